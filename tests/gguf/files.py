"""GGUF files of tiny checkpoints, made once for all tests that only read them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from saccade_bench.fixtures.gguf_files import QWEN2_SPLIT, QWEN35_SPLIT, as_qwen
from saccade_bench.fixtures.tiny import make_checkpoint

GGUF_FAMILIES: tuple[str, ...] = (
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)


@cache
def checkpoint(family: str, tie: bool = False, vision: tuple[tuple[str, Any], ...] = ()) -> Path:
    """A checkpoint whose tokenizer cuts text as Qwen's; llama.cpp's layers all have experts, or
    none.
    """
    text: dict[str, Any] = {"mlp_only_layers": []} if family == "qwen3_vl_moe" else {}
    folder = Path(mkdtemp(prefix="saccade-gguf-")) / "hf"
    made = make_checkpoint(folder, family, tie=tie, text=text, vision=dict(vision))
    return as_qwen(made, QWEN35_SPLIT if family.startswith("qwen3_5") else QWEN2_SPLIT)
