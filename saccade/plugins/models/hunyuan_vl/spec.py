"""HunyuanOCR's `FamilySpec`: sizes, prompts, rotary positions.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from saccade.core.types import Grid, Span
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import (
    DecoderSpec,
    FamilyOptions,
    Placeholder,
    read_options,
)
from saccade.families.kit.config_readers import read_token, text_section
from saccade.nn.shapes import TextConfig
from saccade.plugins.models.hunyuan_vl.config import LearnedConfig, read_text, read_vision
from saccade.plugins.models.hunyuan_vl.images import LineRules, read_images

FAMILY = "hunyuan_vl"


@dataclass(frozen=True, slots=True)
class HunyuanOptions(FamilyOptions):
    """rope_axes: whether the axes' sections divide the values of a head, or its pairs."""

    rope_axes: Literal["values", "pairs"] = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class HunyuanSpec(DecoderSpec):
    """HunyuanOCR's `FamilySpec`: sizes, prompt expansion and positions, importable without
    torch.
    """

    vision: LearnedConfig
    text: TextConfig
    images: LineRules
    position_axes: int  # the last three are an image token's column, row and image index
    paired: bool = False  # both values of a pair are rotated by the same axis

    def with_options(self, options: Mapping[str, str]) -> HunyuanSpec:
        chosen = read_options(HunyuanOptions, self.family, options)
        return replace(self, paired=chosen.rope_axes == "pairs")

    def image_positions(self, grid: Grid) -> npt.NDArray[np.int64]:
        positions = np.tile(np.arange(self.num_tokens(grid)), (self.position_axes, 1))
        rows, columns = self.images.lines(grid)
        row, column = np.indices((rows, columns + 1)).reshape(2, -1)
        positions[-3:, 1:-1] = column, row, np.zeros_like(row)
        return positions

    def positions(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        blocks: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return positions [axes, T], and the next position.

        On all axes, a text token's position is its index in the prompt. Within an image, columns
        and rows start at 0 in the top left corner, and the last axis is the image's index.
        """
        positions = np.tile(np.arange(len(tokens)), (self.position_axes, 1))
        for span in spans:
            inside = slice(span.start + 1, span.end - 1)
            positions[-3:-1, inside] = blocks[span.image][-3:-1, 1:-1]
            positions[-1, inside] = span.image
        return positions, len(tokens)


def hunyuan_spec(checkpoint: Checkpoint) -> HunyuanSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    image = read_token(config, text.vocab_size, "image_token_id", default=120120)
    return HunyuanSpec(
        family=FAMILY,
        vision=vision,
        text=text,
        images=read_images(checkpoint.processor, vision),
        placeholder=Placeholder((image,)),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        position_axes=len(text.rope.sections),
    )
