"""Tokens that an answer may not have, or must: rules beyond sampling, which depend on the tokens
before.

Owns the value types, in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoRepeat:
    """Each n-gram of `size` tokens may occur once within the last `window` tokens (0: all).

    A run may repeat if its last token is in `spared`. prompt: the prompt's tokens count, as in
    transformers' `no_repeat_ngram_size`; False: only the answer's, as in DeepSeek-OCR's processor
    for vLLM.
    """

    size: int
    window: int = 0
    spared: tuple[int, ...] = ()
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After `tokens` tokens of reasoning comes the token `close`.

    begun: the prompt has opened the reasoning; otherwise the token `open` does.
    """

    tokens: int
    open: int
    close: int
    begun: bool


@dataclass(frozen=True, slots=True)
class TokenRules:
    """One answer's rules."""

    allowed: tuple[int, ...] = ()  # the only tokens in the answer; if empty, all are
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the answer avoids
    no_repeat: NoRepeat | None = None
    thinking: ThinkingBudget | None = None
    # the same, also where a run begins in the prompt. A grammar wins where these and `no_repeat`
    # forbid every token that it allows. Where they alone forbid every token, they are dropped for
    # that token.
    banned: tuple[tuple[int, ...], ...] = ()

    @property
    def forbid(self) -> bool:
        """Return True if they forbid tokens. Rules may also only demand one."""
        return bool(self.allowed or self.bad_words or self.banned or self.no_repeat)


NO_RULES = TokenRules()
