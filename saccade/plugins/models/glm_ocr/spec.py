"""GLM-OCR's `FamilySpec`.

Prompts and positions are Qwen2-VL's. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import Placeholder
from saccade.families.kit.config_readers import read_token, text_section
from saccade.families.kit.grid_spec import RaisedSpec
from saccade.plugins.models.glm_ocr.config import CogConfig, read_text, read_vision
from saccade.plugins.models.glm_ocr.images import read_images


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmSpec(RaisedSpec):
    """GLM-OCR's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: CogConfig


def glm_spec(checkpoint: Checkpoint) -> GlmSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    image = read_token(config, text.vocab_size, "image_token_id", default=59280)
    return GlmSpec(
        family="glm_ocr",
        vision=vision,
        text=text,
        images=read_images(checkpoint.processor, vision),
        placeholder=Placeholder((image,)),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
