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
    """Most tokens of an answer whose request names no limit (completions: 16, as in OpenAI's API).
    Derived: max_new_tokens of the checkpoint's generation_config.json, else the rest of the
    context.
    """

    pooling: Pooling = "auto"
    """The making of embeddings and ranks. auto: as the checkpoint's files say
    (Qwen3-VL-Embedding, Qwen3-VL-Reranker). embed, rank: as these have it, though the files do not
    say. last: embeddings are the last state of a chat model, which nobody has trained for that, so
    they are not calibrated. none: there are none.
    """
    lora: tuple[str, ...] = ()
    """An adapter as PEFT writes it (LoRA), NAME=FOLDER; repeat the option for several. Requests
    choose one by the field model. More are loaded by POST /v1/load_lora_adapter.
    """
    max_loras: int = tuned(16, "Adapters loaded at a time; 0: none may be.")
    check_parity: bool = False
    """Compare the first tokens of a few answers with those of transformers' own generate, in a
    process beside (the model is in memory twice meanwhile), before start-up ends; where they
    differ, the server does. Images only where transformers' own modules serve the model.
    """

    def __post_init__(self) -> None:
        at_least(1, self, "default_max_tokens")
        at_least(0, self, "max_loras")
        named(self, "lora")
