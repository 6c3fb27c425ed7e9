"""What can be said of a Qwen3.5 checkpoint without tensors. Images, prompts and positions are
Qwen3-VL's; the language model's layers keep keys and values, or a state per sequence. Knows nothing
of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from saccade.core.errors import ConfigError
from saccade.core.family import Cuts, KVSpec, heads_cache
from saccade.families.checkpoint import Checkpoint
from saccade.families.config_readers import text_section
from saccade.families.hybrid import hybrid_caches, hybrid_cuts
from saccade.families.qwen_vl.qwen3_5.config import parse_config
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.qwen_vl.video import read_video
from saccade.nn.hybrid_config import HybridConfig

NO_TOKEN = -1
"""Stands for no image: to a model without a tower, every token is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Spec(QwenVLSpec):
    """CPU facts of one Qwen3.5 checkpoint; implements `core.family.FamilySpec`. drafts: the head
    that drafts is loaded.
    """

    hybrid: HybridConfig
    drafts: bool = False

    def with_options(self, options: Mapping[str, str]) -> Qwen35Spec:
        others = dict(options)
        wanted = others.pop("mtp", "off")
        spec = QwenVLSpec.with_options(self, others)
        assert isinstance(spec, Qwen35Spec)
        if wanted not in ("on", "off"):
            raise ConfigError(f"--family-option mtp={wanted}: on or off")
        if wanted == "on" and self.hybrid.drafting != 1:
            raise ConfigError(
                "--family-option mtp=on: config.json says of no head that drafts with one layer "
                "(mtp_num_hidden_layers) and the model's own embeddings"
            )
        return replace(spec, drafts=wanted == "on")

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layers, text = hybrid_caches(self.text, self.hybrid, ranks), self.text
        if not self.drafts:
            return KVSpec(layers)
        return KVSpec((*layers, heads_cache(text.kv_heads, text.head_dim, ranks)), drafts=True)

    @property
    def cuts(self) -> Cuts:
        text, vision = self.text, self.vision
        experts = text.experts
        return Cuts(
            text=hybrid_cuts(text, self.hybrid.delta),
            heads=text.heads,
            kv_heads=text.kv_heads,
            encoder=(
                (vision.heads, "vision attention heads"),
                (vision.intermediate, "vision MLP values"),
            ),
            encoder_width=vision.hidden,
            experts=experts.count if experts else 0,
            expert_width=experts.width if experts else 0,
        )


def qwen3_5_spec(checkpoint: Checkpoint) -> Qwen35Spec:
    """Read a Qwen3.5 checkpoint's facts. Raises CheckpointError naming file and field."""
    vision, text, hybrid, rules = parse_config(checkpoint)
    section = text_section(checkpoint.config)
    return Qwen35Spec(
        family="qwen3_5_moe" if text.experts else "qwen3_5",
        vision=vision,
        text=text,
        hybrid=hybrid,
        image_rules=rules,
        image_token_id=checkpoint.config.integer("image_token_id", default=248056)
        if vision.depth
        else NO_TOKEN,
        video_token_id=checkpoint.config.integer("video_token_id", default=248057)
        if vision.depth
        else NO_TOKEN,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        video=read_video(checkpoint, "qwen3_vl", rules) if vision.depth else None,
    )
