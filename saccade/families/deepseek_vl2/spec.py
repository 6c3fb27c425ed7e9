"""What a DeepSeek-VL2 checkpoint says without tensors: sizes, prompts, what is kept per token.

Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import CheckpointError
from saccade.core.family import Cuts, KVSpec, Templates, heads_cache, latent_cache
from saccade.families.base_spec import BLIND, AttendingTower, BaseSpec, Placeholder, plain_cuts
from saccade.families.checkpoint import Checkpoint
from saccade.families.config_readers import read_tokenizer
from saccade.families.deepseek_vl2.config import DeepseekText, read_text, read_vision
from saccade.families.deepseek_vl2.images import NO_IMAGES, CandidateRules, read_images
from saccade.nn.tower_config import SiglipConfig

TEMPLATES = Templates(default=Path(__file__).parent / "chat.jinja")
IMAGE = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(BaseSpec):
    """The answers for DeepSeek's language model behind any tower."""

    vision: AttendingTower
    text: DeepseekText

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        shape, latent = self.text.shape, self.text.latent
        if latent is None:
            return KVSpec((heads_cache(shape.kv_heads, shape.head_dim, ranks),) * shape.layers)
        return KVSpec((latent_cache(latent.width),) * shape.layers)

    @property
    def cuts(self) -> Cuts:
        text, experts = self.text.shape, self.text.shape.experts
        width = experts.width if experts else 0
        shared = self.text.routing.shared * width if self.text.routing else 0
        return replace(
            plain_cuts(text, self.vision),
            text=(
                (text.heads, "attention heads"),
                (text.intermediate, "MLP values"),
                *(((shared, "values of shared experts"),) if shared else ()),
            ),
            experts=experts.count if experts else 0,
            expert_width=width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekSpec(LatentSpec):
    """CPU facts of one DeepSeek-VL2 checkpoint."""

    vision: SiglipConfig
    images: CandidateRules


def deepseek_spec(checkpoint: Checkpoint) -> DeepseekSpec:
    """Read a checkpoint's facts. Raises CheckpointError naming file and field."""
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
