"""Options for answers, written as in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.bounds import at_least


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Properties of answers whose requests leave them open."""

    default_max_tokens: int | None = None
    """Tokens that an answer may have where its request names no limit (completions: 16, as OpenAI
    has it). Derived: max_new_tokens of the checkpoint's generation_config.json, else as many as
    the context leaves.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")
