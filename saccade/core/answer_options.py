"""Options for answers, written as in `options.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.core.bounds import at_least, named
from saccade.core.tuning import basic, tuned

Pooling = Literal["auto", "last", "embed", "rank", "none"]
"""As `AnswerOptions.pooling`."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Answer settings that requests leave open, and adapters that requests choose."""

    default_max_tokens: int | None = basic(None)
    """Maximum length of an answer whose request sets none (completions: 16, as in OpenAI's API).
    Derived: max_new_tokens of the checkpoint's generation_config.json, else the rest of the
    context.
    """

    pooling: Pooling = "auto"
    """How embeddings and ranks are computed. auto: as the checkpoint's files say
    (Qwen3-VL-Embedding, Qwen3-VL-Reranker). embed, rank: as these models do, if the files do not
    say. last: embed by the last state of a chat model. It was not trained for that, so embeddings
    are not calibrated. none: turn both off.
    """
    lora: tuple[str, ...] = ()
    """An adapter as PEFT writes it (LoRA), NAME=FOLDER. Repeat the option for several. Requests
    choose one by the field model. POST /v1/load_lora_adapter loads more.
    """
    max_loras: int = tuned(16, "Maximum loaded adapters. 0 refuses all adapters.")

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")
        at_least(0, self, "max_loras")
        named(self, "lora")
