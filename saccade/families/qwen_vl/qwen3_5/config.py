"""Qwen3.5's configuration, typed. The vision tower is read as Qwen3-VL's, whose extra levels it
has not. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Checkpoint, Section
from saccade.families.config_readers import (
    experts_config,
    read_heads,
    read_rope,
    read_theta,
    refuse_unsupported,
    text_section,
)
from saccade.families.qwen_vl.config import (
    NO_IMAGES,
    NO_VISION,
    ImageRules,
    VisionConfig,
    image_rules,
    vision_config,
)
from saccade.nn.text_config import RopeConfig, TextConfig

TEXT_ONLY = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Architectures, and model types, of checkpoints that hold the language model alone. The fields of
their config.json are those of the others' `text_config`.
"""
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The gated delta rule's heads, over all ranks: each of queries and keys serves
    `value_heads / key_heads` neighbouring ones of values. taps: inputs of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Values of all keys of a token, or of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """What the language model has beyond `TextConfig`. full: which layers have full attention; the
    others have the delta rule. rotary_dim: values of a head, its first ones, that are turned.
    shared: values of the expert that all rows go to besides; 0 where layers have no experts.
    drafting: layers of the head that drafts; 0: none that is known here.
    """

    full: tuple[bool, ...]
    delta: DeltaConfig
    rotary_dim: int
    shared: int
    drafting: int = 0


def parse_config(
    checkpoint: Checkpoint,
) -> tuple[VisionConfig, TextConfig, HybridConfig, ImageRules]:
    """All that the JSON files say. Raises CheckpointError naming file and field."""
    config = checkpoint.config
    text, hybrid = _text(config, text_section(config))
    if checkpoint.architecture() in TEXT_ONLY:
        return NO_VISION, text, hybrid, NO_IMAGES
    section = config.section("vision_config")
    # Some files name the levels that the tower has not got: an empty list of them.
    levels: dict[str, list[int]] = {"deepstack_visual_indexes": []}
    vision = vision_config("qwen3_vl", Section(section.where, {**section.data, **levels}))
    if vision.out_hidden != text.hidden:
        raise CheckpointError(
            f"{config.where}: the vision tower puts out {vision.out_hidden} values, the text "
            f"model takes {text.hidden}"
        )
    return vision, text, hybrid, image_rules("qwen3_vl", vision, checkpoint.processor)


def _text(config: Section, text: Section) -> tuple[TextConfig, HybridConfig]:
    refuse_unsupported(text, "attention_bias")
    if not text.flag("attn_output_gate", default=True):
        raise CheckpointError(f"{text.where}: attn_output_gate false is not supported")
    heads, kv_heads = read_heads(text)
    head_dim = text.count("head_dim", default=256)
    rope, rotary_dim = _rope(text, head_dim)
    layers = text.layers("num_hidden_layers")
    sparse = text.has("num_experts")
    shared = text.integer("shared_expert_intermediate_size", default=512) if sparse else 0
    model = TextConfig(
        vocab_size=text.count("vocab_size"),
        hidden=text.count("hidden_size"),
        intermediate=shared or text.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=text.number("rms_norm_eps", default=1e-6),
        rope=rope,
        context_length=text.count("max_position_embeddings"),
        qkv_bias=False,
        qk_norm=True,
        tied=config.flag("tie_word_embeddings"),
        experts=experts_config(text) if sparse else None,
    )
    own = text.flag("mtp_use_dedicated_embeddings")
    drafting = 0 if own else text.integer("mtp_num_hidden_layers", default=0)
    kinds = _layers(text, layers)
    return model, HybridConfig(kinds, _delta(text), rotary_dim, shared, drafting)


def _layers(text: Section, count: int) -> tuple[bool, ...]:
    """The layers with full attention."""
    names = text.data.get("layer_types")
    if names is None:
        interval = text.count("full_attention_interval", default=4)
        return tuple((layer + 1) % interval == 0 for layer in range(count))
    if (
        not isinstance(names, list)
        or len(names) != count
        or any(name not in (FULL, LINEAR) for name in names)
    ):
        raise CheckpointError(
            f"{text.where}: layer_types must name {FULL} or {LINEAR} for each of {count} layers"
        )
    if FULL not in names:
        raise CheckpointError(f"{text.where}: layer_types has no {FULL}, which is not supported")
    return tuple(name == FULL for name in names)


def _delta(text: Section) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=text.integer("linear_num_key_heads", default=16),
        value_heads=text.integer("linear_num_value_heads", default=32),
        key_dim=text.integer("linear_key_head_dim", default=128),
        value_dim=text.integer("linear_value_head_dim", default=128),
        taps=text.integer("linear_conv_kernel_dim", default=4),
    )
    if min(delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim) < 1:
        raise CheckpointError(f"{text.where}: linear_* sizes must be at least 1")
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"{text.where}: {delta.value_heads} linear value heads cannot share "
            f"{delta.key_heads} key heads evenly"
        )
    if delta.taps < 2:
        raise CheckpointError(f"{text.where}: linear_conv_kernel_dim must be at least 2")
    return delta


def _rope(text: Section, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and how many values of a head it turns."""
    rope = read_rope(text)
    part = rope.number(
        "partial_rotary_factor", default=text.number("partial_rotary_factor", default=0.25)
    )
    turned = int(head_dim * part)
    sections = rope.integers("mrope_section", default=(11, 11, 10))
    if len(sections) != 3 or 2 * sum(sections) != turned:
        raise CheckpointError(
            f"{rope.where}: mrope_section {list(sections)} must be three figures that sum to "
            f"{turned // 2}"
        )
    theta = read_theta(text, rope)
    return RopeConfig(theta, (sections[0], sections[1], sections[2]), interleaved=True), turned
