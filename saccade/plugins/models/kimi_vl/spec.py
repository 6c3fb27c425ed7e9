"""Kimi-VL's `FamilySpec`. The language model is DeepSeek's, with latent attention and experts.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import Placeholder
from saccade.families.kit.config_readers import read_token
from saccade.plugins.models.kimi_vl.config import MoonConfig, read_vision
from saccade.plugins.models.kimi_vl.images import PaddedRules, read_images
from saccade.plugins.models.kit.deepseek_text import LatentSpec, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiSpec(LatentSpec):
    """Kimi-VL's `FamilySpec`: sizes, prompt expansion and positions, importable without torch."""

    vision: MoonConfig
    images: PaddedRules


def kimi_spec(checkpoint: Checkpoint) -> KimiSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = config.section("text_config")
    text = read_text(section)
    vision = read_vision(config, text.hidden)
    image = read_token(config, text.vocab_size, "media_placeholder_token_id", default=163605)
    return KimiSpec(
        family="kimi_vl",
        vision=vision,
        text=text,
        images=read_images(checkpoint.processor, vision),
        placeholder=Placeholder((image,)),
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )
