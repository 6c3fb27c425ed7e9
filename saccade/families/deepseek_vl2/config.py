"""The shapes of DeepSeek-VL2's language model and tower, as `config.json` says them.

Also reads the language model alone, DeepSeek-V2 (transformers' DeepseekV2ForCausalLM). Runs without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from saccade.core.errors import CheckpointError
from saccade.families.base_spec import ShapedText
from saccade.families.checkpoint import Section
from saccade.families.config_readers import (
    check_heads,
    read_heads,
    read_rope,
    read_text_config,
    read_theta,
    read_yarn,
    refuse_flags,
    refuse_unsupported,
)
from saccade.nn.text_config import ExpertsConfig, LatentConfig, RopeConfig, yarn_scale
from saccade.nn.tower_config import SiglipConfig

LATENT_EPS = 1e-6
"""Of the norms within attention, whatever the others' is."""
ABSENT = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
"""What transformers takes a field for that a file does not have."""
Pairs = Literal["halves", "neighbours"]
Method = Literal["greedy", "group_limited_greedy", "noaux_tc"]
Scoring = Literal["softmax", "sigmoid"]
METHODS: dict[str, Method] = {name: name for name in get_args(Method)}
SCORINGS: dict[str, Scoring] = {name: name for name in get_args(Scoring)}


@dataclass(frozen=True, slots=True)
class Routing:
    """DeepSeekMoE's router.

    Each row goes to `top` experts, chosen within its `top_groups` best among `groups` groups.
    normalised: shares sum to one before `factor` multiplies them. shared: experts that take every
    row.
    """

    top: int
    scoring: Scoring
    method: Method
    groups: int
    top_groups: int
    normalised: bool
    factor: float
    shared: int


@dataclass(frozen=True, slots=True)
class DeepseekText(ShapedText):
    """The language model.

    latent None: attention has ordinary heads. routing None: no experts.
    """

    latent: LatentConfig | None
    routing: Routing | None

    @property
    def rotary_dim(self) -> int:
        """Values in a head that rope rotates."""
        return self.latent.rotated if self.latent else self.shape.head_dim


NO_TOWER = SiglipConfig(0, 0, 0, 0, "gelu_pytorch_tanh", 1e-6, 0, 1, 1, 0)


# ---- the language model


def read_text(text: Section) -> DeepseekText:
    """Read the language model.

    Raises CheckpointError naming file and field.
    """
    refuse_unsupported(text, "attention_bias", "mlp_bias")
    text = text.filled(ABSENT)
    (heads, _), hidden = read_heads(text), text.count("hidden_size")
    layers = text.layers("num_hidden_layers")
    latent = _latent(text)
    if latent is None:
        check_heads(text, hidden, heads)
    head_dim = hidden // heads if latent is None else latent.plain + latent.rotated
    rope = read_rope(text, "default", "yarn")
    theta = read_theta(text, rope)
    yarn = read_yarn(text, rope, theta)
    if latent is not None and yarn is not None:
        # As transformers' `yarn_apply_mscale`: queries and keys, whole, are both this much larger.
        scale = yarn_scale(yarn.factor, rope.number("mscale_all_dim", default=0))
        latent = replace(latent, sharpness=scale**2)
    rotated = head_dim if latent is None else latent.rotated
    experts, routing = _experts(text, layers)
    # Latents' keys are turned by neighbours, ordinary heads by halves.
    pairs: Pairs = "neighbours" if latent else "halves"
    shape = read_text_config(
        text,
        RopeConfig(theta, (rotated // 2,), interleaved=False, pairs=pairs, yarn=yarn),
        head_dim,
        tied=text.flag("tie_word_embeddings"),
        experts=experts,
    )
    return DeepseekText(shape, latent, routing)


def _latent(text: Section) -> LatentConfig | None:
    if not text.flag("use_mla", default=True):
        return None
    # A null says that there is none; a field left out, that there are as many as in DeepSeek-V2.
    direct = "q_lora_rank" in text.data and not text.has("q_lora_rank")
    latent = LatentConfig(
        latent=text.integer("kv_lora_rank", default=512),
        plain=text.integer("qk_nope_head_dim", default=128),
        rotated=text.integer("qk_rope_head_dim", default=64),
        values=text.integer("v_head_dim", default=128),
        query_latent=None if direct else text.integer("q_lora_rank", default=1536),
        eps=LATENT_EPS,
    )
    sizes = (latent.latent, latent.plain, latent.rotated, latent.values, latent.query_latent or 1)
    if min(sizes) < 1 or latent.rotated % 2:
        raise CheckpointError(
            f"{text.where}: kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim and "
            "v_head_dim must be at least 1, and qk_rope_head_dim even"
        )
    return latent


def _experts(text: Section, layers: int) -> tuple[ExpertsConfig | None, Routing | None]:
    if not text.has("n_routed_experts"):
        return None, None
    count, top = text.integer("n_routed_experts"), text.integer("num_experts_per_tok")
    method = text.text("topk_method", default="greedy")
    scoring = text.text("scoring_func", default="softmax")
    for name, value, known in (
        ("topk_method", method, METHODS),
        ("scoring_func", scoring, SCORINGS),
    ):
        if value not in known:
            raise CheckpointError(
                f"{text.where}: {name} {value!r} is not supported ({', '.join(known)} are)"
            )
    groups = text.integer("n_group", default=1)
    best = text.integer("topk_group", default=groups)
    if groups < 1 or count % groups or not 1 <= best <= groups:
        raise CheckpointError(
            f"{text.where}: topk_group must be from 1 to n_group, and n_group divide {count} "
            f"experts, not {best} and {groups}"
        )
    if not 1 <= top <= count // groups * best or (method == "noaux_tc" and count < 2 * groups):
        raise CheckpointError(
            f"{text.where}: num_experts_per_tok {top} of {count} experts in {groups} groups, "
            f"{best} of which are taken, cannot be"
        )
    first = text.integer("first_k_dense_replace", default=0)
    step = max(1, text.integer("moe_layer_freq", default=1))
    sparse = frozenset(i for i in range(layers) if i >= first and not i % step)
    experts = ExpertsConfig(sparse, count, top, text.integer("moe_intermediate_size", default=1407))
    routing = Routing(
        top,
        SCORINGS[scoring],
        METHODS[method],
        groups,
        best,
        text.flag("norm_topk_prob"),
        text.number("routed_scaling_factor", default=1.0),
        text.integer("n_shared_experts", default=0),
    )
    return experts, routing


# ---- the vision tower


def read_vision(config: Section, out: int) -> SiglipConfig:
    """Return the vision tower, whose tokens have `out` values. Raises CheckpointError."""
    if not config.has("language_config"):
        return NO_TOWER
    vision, projector = config.section("vision_config"), config.section("projector_config")
    kind = projector.text("projector_type", default="downsample_mlp_gelu")
    if kind != "downsample_mlp_gelu" or projector.flag("token_pooling"):
        raise CheckpointError(
            f"{projector.where}: projector_type {kind!r} is not supported, or token_pooling is set "
            "(downsample_mlp_gelu without it is)"
        )
    refuse_flags(vision, "class_token")
    hidden = vision.count("width", default=1024)
    for name, absent, wanted in (
        ("input_dim", 1152, hidden),
        ("n_embed", 2048, out),
        ("depth", 2, 2),
        ("mlp_ratio", 1, 1),
    ):
        if (found := projector.integer(name, default=absent)) != wanted:
            raise CheckpointError(f"{projector.where}: {name} must be {wanted}, not {found}")
    heads = vision.count("heads", default=16)
    side, patch = (
        vision.integer("image_size", default=384),
        vision.integer("patch_size", default=16),
    )
    merge = projector.integer("downsample_ratio", default=2)
    if min(patch, merge) < 1 or side < patch or hidden % heads:
        raise CheckpointError(
            f"{vision.where}: tiles of {side} pixels in patches of {patch}, {merge} x {merge} "
            f"brought together, or {hidden} values in {heads} heads, cannot be"
        )
    return SiglipConfig(
        depth=vision.layers("layers", default=24),
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * vision.number("mlp_ratio", default=4.0)),
        activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
        side=side,
        patch=patch,
        merge=merge,
        out_hidden=out,
        fused=True,
    )
