"""Options for answers, written as in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.bounds import at_least
from saccade.core.tuning import basic


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Properties of answers whose requests leave them open."""

    default_max_tokens: int | None = basic(None)
    """Most tokens of an answer whose request names no limit (completions: 16, as in OpenAI's API).
    Derived: max_new_tokens of the checkpoint's generation_config.json, else the rest of the
    context.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")
