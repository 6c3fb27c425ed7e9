"""PaddleOCR-VL's `FamilySpec`.

Prompts and positions are Qwen2-VL's. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import Placeholder
from saccade.families.kit.config_readers import read_token, text_section
from saccade.families.kit.grid_spec import RaisedSpec
from saccade.plugins.models.paddleocr_vl.config import FittedConfig, read_text, read_vision
from saccade.plugins.models.paddleocr_vl.images import read_images


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleSpec(RaisedSpec):
    """PaddleOCR-VL's `FamilySpec`: sizes, prompt expansion and positions, importable
    without torch.
    """

    vision: FittedConfig


def paddle_spec(checkpoint: Checkpoint) -> PaddleSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    image = read_token(config, text.vocab_size, "image_token_id", default=100295)
    return PaddleSpec(
        family="paddleocr_vl",
        vision=vision,
        text=text,
        images=read_images(checkpoint.processor, vision),
        placeholder=Placeholder((image,)),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
