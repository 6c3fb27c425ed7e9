"""Qwen3.5's `FamilySpec`.

Images, prompts and positions are the same as in Qwen3-VL, but the vision encoder has no deepstack
levels. Layers of the language model cache keys and values, or a state per sequence. Runs without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from saccade.core.errors import ConfigError
from saccade.core.family import Cuts, KVSpec, heads_cache
from saccade.families.checkpoint import Checkpoint
from saccade.families.kit.base_spec import BLIND, plain_cuts, read_options
from saccade.families.kit.config_readers import text_section
from saccade.families.kit.native_images import NO_IMAGES
from saccade.families.qwen_vl.config import NO_VISION, read_vision
from saccade.families.qwen_vl.spec import (
    TEMPLATES,
    QwenOptions,
    QwenVLSpec,
    read_images,
    read_placeholder,
)
from saccade.families.qwen_vl.video import read_video
from saccade.plugins.models.kit.hybrid_config import HybridConfig
from saccade.plugins.models.kit.hybrid_text import hybrid_caches, hybrid_cuts, read_hybrid

TEXT_ONLY = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Architectures and model types of checkpoints with only the language model. The top level of their
config.json has the fields that `text_config` has in other checkpoints.
"""


@dataclass(frozen=True, slots=True)
class Qwen35Options(QwenOptions):
    """The options of the Qwen3.5 family, in addition to Qwen-VL's."""

    mtp: Literal["on", "off"] = "off"  # whether to load the MTP head, which drafts tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Spec(QwenVLSpec):
    """Qwen3.5's `FamilySpec`: Qwen-VL's, with the caches of a hybrid language model."""

    hybrid: HybridConfig
    drafts: bool = False  # whether the MTP head is loaded

    def with_options(self, options: Mapping[str, str]) -> Qwen35Spec:
        chosen = read_options(Qwen35Options, self.family, options)
        drafts = chosen.mtp == "on"
        if drafts and self.hybrid.drafting != 1:
            raise ConfigError(
                "--family-option mtp=on: config.json must describe an MTP head with one layer "
                "(mtp_num_hidden_layers) that uses the model's own embeddings"
            )
        return replace(self, patch_embed=chosen.patch_embed, drafts=drafts)

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        layers, text = hybrid_caches(self.text, self.hybrid, ranks), self.text
        if not self.drafts:
            return KVSpec(layers)
        return KVSpec((*layers, heads_cache(text.kv_heads, text.head_dim, ranks)), drafts=True)

    @property
    def cuts(self) -> Cuts:
        plain = plain_cuts(self.text, self.vision)
        return replace(plain, text=hybrid_cuts(self.text, self.hybrid.delta))


def qwen3_5_spec(checkpoint: Checkpoint) -> Qwen35Spec:
    """Create the spec from a Qwen3.5 checkpoint's JSON files. Raises CheckpointError with the file
    and the field.
    """
    config = checkpoint.config
    section = text_section(config)
    text, hybrid = read_hybrid(config, section)
    vision, images, placeholder, video = NO_VISION, NO_IMAGES, BLIND, None
    if checkpoint.architecture() not in TEXT_ONLY:
        # Some files list deepstack levels that the vision encoder does not have.
        tower = config.section("vision_config")
        tower = tower.changed({"deepstack_visual_indexes": []})
        vision = read_vision("qwen3_vl", config, tower, text.hidden)
        images = read_images(checkpoint.processor, vision)
        placeholder = read_placeholder(checkpoint, 248056)
        video = read_video(checkpoint, "qwen3_vl", images)
    return Qwen35Spec(
        family="qwen3_5_moe" if text.experts else "qwen3_5",
        vision=vision,
        text=text,
        images=images,
        placeholder=placeholder,
        templates=TEMPLATES,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
        video=video,
        hybrid=hybrid,
    )
