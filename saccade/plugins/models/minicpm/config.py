"""Reads the sizes of MiniCPM-V's language model and vision encoder from `config.json`, and how the
models of the family differ.

The language model is a Qwen3.5. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    SiglipDefaults,
    read_siglip,
    refuse_flags,
    require_kind,
)
from saccade.nn.shapes import SiglipConfig, TextConfig
from saccade.plugins.models.kit.hybrid_config import HybridConfig
from saccade.plugins.models.kit.hybrid_text import read_hybrid

SIGLIP = SiglipDefaults(hidden=768, heads=12, side=224, patch=16)
MERGES = {"16x": 4, "4x": 2}
"""For each `downsample_mode`, the edge, in patches, of the square that becomes one token."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """The properties in which the models of the family differ, by `model_type`."""

    name: str
    # the axes of positions. With three, image tokens have coordinates on a canvas (`positions.py`).
    axes: Literal[1, 3] = 1
    mode: str = "16x"  # the default of `downsample_mode`
    tied: bool = False  # the default of `tie_word_embeddings`
    # the image processor is MiniCPM-OCR's, which resizes like torch instead of Pillow, and need not
    # enlarge small images
    pages: bool = False


SIBLINGS = {
    each.name: each
    for each in (
        Sibling("minicpmv4_6"),
        Sibling("minicpmv4_7", axes=3),
        Sibling("minicpm_ocr", mode="4x", tied=True, pages=True),
    )
}


@dataclass(frozen=True, slots=True)
class MergingTower:
    """The sizes of SigLIP, and the layer after which 2 x 2 patches become one.

    `insert` is that layer, if a token is 4 x 4 patches (`siglip.merge`). `siglip.side` is the edge,
    in pixels, of an image that has the learned positions' native size.
    """

    siglip: SiglipConfig
    insert: int

    @property
    def halves(self) -> bool:
        """Whether 2 x 2 patches become one within the vision encoder."""
        return self.siglip.merge == 4

    @property
    def layers_after(self) -> int:
        """The number of layers after the merger, which process a quarter of the rows."""
        return self.siglip.depth - self.insert - 1 if self.halves else 0

    @property
    def depth(self) -> int:
        """The cost of the vision encoder, in layers over all patches.

        Layers after the merger count a quarter each, rounded up in total. The merger counts as one.
        """
        after = self.layers_after
        return self.siglip.depth - after + (1 - -after // 4 if self.halves else 0)


def read_sibling(config: Section) -> Sibling:
    """Return the properties of the checkpoint's model within the family. Raises CheckpointError."""
    kind = config.text("model_type", default="minicpmv4_6")
    if kind not in SIBLINGS:
        raise CheckpointError(
            f"{config.where}: model_type {kind!r} is not supported ({', '.join(SIBLINGS)} are)"
        )
    return SIBLINGS[kind]


def read_text(config: Section, text: Section, sibling: Sibling) -> tuple[TextConfig, HybridConfig]:
    """Read the language model's sizes and options from config.json. Raises CheckpointError."""
    kind = text.text("model_type", default="qwen3_5_text")
    if kind != "qwen3_5_text":
        raise CheckpointError(
            f"{text.where}: model_type {kind!r} is not supported (qwen3_5_text is)"
        )
    model, hybrid = read_hybrid(config, text, sibling.axes)
    # Text-only files may have it, too. The network checks whether there is an output head.
    tied = config.flag("tie_word_embeddings", default=sibling.tied)
    return replace(model, tied=tied or text.flag("tie_word_embeddings")), hybrid


def read_vision(config: Section, out: int, sibling: Sibling) -> MergingTower:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    section = config.section("vision_config")
    require_kind(section, f"{sibling.name}_vision")
    siglip = read_siglip(section, 1, out, SIGLIP)
    fixed = ((section, "window_kernel_size"), (config, "merge_kernel_size"))
    for where, name in fixed:
        if (size := where.integers(name, default=(2, 2))) != (2, 2):
            raise CheckpointError(
                f"{where.where}: {name} {list(size)} is not supported ([2, 2] is)"
            )
    if (times := config.integer("merger_times", default=1)) != 1:
        raise CheckpointError(
            f"{config.where}: merger_times {times} is not supported (1 is): the image processor "
            "does not count these tokens"
        )
    refuse_flags(config, "drop_vision_last_layer")
    insert = config.integer("insert_layer_id", default=6)
    if not 0 <= insert < siglip.depth:
        raise CheckpointError(
            f"{config.where}: insert_layer_id {insert} is not one of the vision encoder's "
            f"{siglip.depth} layers"
        )
    return MergingTower(replace(siglip, merge=MERGES[read_mode(config, sibling)]), insert)


def read_mode(section: Section, sibling: Sibling) -> str:
    """Return `downsample_mode`, a key of `MERGES`. Raises CheckpointError."""
    mode = section.text("downsample_mode", default=sibling.mode)
    if mode not in MERGES:
        raise CheckpointError(
            f"{section.where}: downsample_mode {mode!r} is not supported ({' and '.join(MERGES)} "
            "are)"
        )
    return mode
