"""What a Kimi-VL checkpoint says without tensors. Its language model is DeepSeek's, with latents
and experts.

Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.families.base_spec import Placeholder
from saccade.families.checkpoint import Checkpoint
from saccade.families.config_readers import read_token
from saccade.families.deepseek_vl2.config import read_text
from saccade.families.deepseek_vl2.kimi_vl.config import MoonConfig, read_vision
from saccade.families.deepseek_vl2.kimi_vl.images import PaddedRules, read_images
from saccade.families.deepseek_vl2.spec import LatentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiSpec(LatentSpec):
    """CPU facts of one Kimi-VL checkpoint."""

    vision: MoonConfig
    images: PaddedRules


def kimi_spec(checkpoint: Checkpoint) -> KimiSpec:
    """Read a Kimi-VL checkpoint's facts. Raises CheckpointError naming file and field."""
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
