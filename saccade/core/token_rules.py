"""Rules that forbid or force tokens of a response, depending on the tokens before them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoRepeat:
    """Allow each n-gram of `size` tokens only once within the last `window` tokens (0: all)."""

    size: int
    window: int = 0
    spared: tuple[int, ...] = ()  # n-grams that end with one of these tokens may repeat
    # True: prompt tokens count, as in transformers' `no_repeat_ngram_size`. False: only generated
    # tokens count, as in DeepSeek-OCR's processor for vLLM.
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Force the token `close`, which ends reasoning, after `tokens` tokens of reasoning."""

    tokens: int
    open: int  # the token that starts reasoning
    close: int
    begun: bool  # True if the prompt ends within reasoning


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules that apply to one response."""

    allowed: tuple[int, ...] = ()  # if not empty, only these tokens can be sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden token sequences
    no_repeat: NoRepeat | None = None
    thinking: ThinkingBudget | None = None
    # Like `bad_words`, but a match may start in the prompt. If `banned` and `no_repeat` forbid
    # every token that a grammar allows, the grammar wins. If they forbid every token, they are
    # ignored for this position.
    banned: tuple[tuple[int, ...], ...] = ()

    @property
    def forbid(self) -> bool:
        """True if the rules can forbid tokens. Otherwise they can only force one."""
        return bool(self.allowed or self.bad_words or self.banned or self.no_repeat)


NO_RULES = TokenRules()
