"""Tokens that an answer may not have, or must: rules beyond sampling, which depend on the tokens
before.

Owns the value types, in tokens. Knows nothing of texts, logits or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoRepeat:
    """No run of `size` tokens stands twice within the last `window` tokens (0: all), unless its
    last token is in `spared`. prompt: the prompt's tokens count, as in transformers'
    `no_repeat_ngram_size`; False: only the answer's, as in DeepSeek-OCR's processor for vLLM.
    """

    size: int
    window: int = 0
    spared: tuple[int, ...] = ()
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After `tokens` tokens of reasoning comes the token `close`. begun: the prompt has opened the
    reasoning; otherwise the token `open` does.
    """

    tokens: int
    open: int
    close: int
    begun: bool


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of one answer.

    allowed: the only tokens of the answer; empty: all. bad_words: runs of tokens that the answer
    does not have. Where a grammar leaves no token that these and `no_repeat` allow, the grammar
    wins; where they alone leave none, they do not hold for that token.
    """

    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat: NoRepeat | None = None
    thinking: ThinkingBudget | None = None

    @property
    def forbid(self) -> bool:
        """True if they forbid tokens, not only demand one."""
        return bool(self.allowed or self.bad_words or self.no_repeat)

    @property
    def depend(self) -> bool:
        """True if they depend on the tokens of the answer so far."""
        return bool(self.bad_words or self.no_repeat or self.thinking)


NO_RULES = TokenRules()
