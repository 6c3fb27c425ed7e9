"""DeepSeek-VL2's `FamilySpec`: sizes, prompts, and the cached data per token.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import CheckpointError
from saccade.core.family import Templates
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import BLIND, Placeholder
from saccade.families.kit.config_readers import read_tokenizer
from saccade.nn.shapes import SiglipConfig
from saccade.plugins.models.deepseek_vl2.config import read_vision
from saccade.plugins.models.deepseek_vl2.images import NO_IMAGES, CandidateRules, read_images
from saccade.plugins.models.kit.deepseek_text import LatentSpec, read_text

TEMPLATES = Templates(default=Path(__file__).parent / "chat.jinja")
IMAGE = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekSpec(LatentSpec):
    """DeepSeek-VL2's `FamilySpec`: sizes, prompt expansion and positions, importable
    without torch.
    """

    vision: SiglipConfig
    images: CandidateRules


def deepseek_spec(checkpoint: Checkpoint) -> DeepseekSpec:
    """Create the spec from a checkpoint's JSON files.

    Raises CheckpointError with the file and the field.
    """
    config = checkpoint.config
    section = config.section("language_config") if config.has("language_config") else config
    text = read_text(section)
    vision = read_vision(config, text.hidden)
    images, placeholder = NO_IMAGES, BLIND
    if vision.depth:
        images = read_images(checkpoint, vision)
        placeholder = Placeholder((_image_token(checkpoint),))
    return DeepseekSpec(
        family="deepseek_vl_v2" if vision.depth else "deepseek_v2",
        vision=vision,
        text=text,
        images=images,
        tiles=images if vision.depth else None,
        placeholder=placeholder,
        templates=TEMPLATES,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _image_token(checkpoint: Checkpoint) -> int:
    path = checkpoint.folder / "tokenizer.json"
    token = read_tokenizer(path).token_to_id(IMAGE)
    if token is None:
        raise CheckpointError(f"{path}: the tokenizer has no {IMAGE}")
    return int(token)
