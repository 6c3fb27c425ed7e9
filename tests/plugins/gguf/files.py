"""Tiny checkpoints that GGUF files are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fixtures.gguf_files import QWEN2_SPLIT, QWEN35_SPLIT, as_qwen
from tests.fixtures.tiny import make_checkpoint

GGUF_FAMILIES: tuple[str, ...] = (
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)


def make_gguf_checkpoint(folder: Path, family: str, *, tie: bool = False) -> Path:
    """Write a checkpoint whose tokenizer cuts text as Qwen's. In llama.cpp all layers have experts,
    or none.
    """
    text: dict[str, Any] = {"mlp_only_layers": []} if family == "qwen3_vl_moe" else {}
    made = make_checkpoint(folder, family, tie=tie, text=text)
    return as_qwen(made, QWEN35_SPLIT if family.startswith("qwen3_5") else QWEN2_SPLIT)
