"""The configuration of DeepSeek-V2's language model, which DeepSeek-VL2 and Kimi-VL use: its shapes
from `config.json`, and its KV cache. Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from saccade.core.errors import CheckpointError
from saccade.core.family import Cuts, KVSpec, heads_cache, latent_cache
from saccade.families.checkpoint import Section
from saccade.families.kit.base_spec import AttendingTower, BaseSpec, ShapedText, plain_cuts
from saccade.families.kit.config_readers import (
    check_heads,
    read_heads,
    read_rope,
    read_text_config,
    read_theta,
    read_yarn,
    refuse_unsupported,
)
from saccade.nn.shapes import ExpertsConfig, LatentConfig, RopeConfig, yarn_scale

LATENT_EPS = 1e-6
"""Epsilon of the norms inside attention, which does not depend on `rms_norm_eps`."""
ABSENT = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
"""The defaults of transformers' class for fields that config.json does not have."""
Pairs = Literal["halves", "neighbours"]
Method = Literal["greedy", "group_limited_greedy", "noaux_tc"]
Scoring = Literal["softmax", "sigmoid"]
METHODS: dict[str, Method] = {name: name for name in get_args(Method)}
SCORINGS: dict[str, Scoring] = {name: name for name in get_args(Scoring)}


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's parameters in DeepSeekMoE. Each token is processed by `top` experts, chosen from
    its best `top_groups` groups of experts.
    """

    top: int
    scoring: Scoring
    method: Method
    groups: int
    top_groups: int
    normalised: bool  # whether weights are normalized to sum to 1, before they are scaled
    factor: float  # scales the weights
    shared: int  # number of shared experts, which compute all tokens


@dataclass(frozen=True, slots=True)
class DeepseekText(ShapedText):
    """The language model's sizes and options."""

    latent: LatentConfig | None  # `None` if attention has ordinary heads
    routing: Routing | None  # `None` if the model has no experts

    @property
    def rotary_dim(self) -> int:
        """The number of values of a head that RoPE rotates."""
        return self.latent.rotated if self.latent else self.shape.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(BaseSpec):
    """Base class of specs with DeepSeek's language model and any vision encoder."""

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


def read_text(text: Section) -> DeepseekText:
    """Read the language model's section of config.json.

    Raises CheckpointError with the file and the field.
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
        # As in transformers' `yarn_apply_mscale`, both queries and keys are scaled by this factor.
        scale = yarn_scale(yarn.factor, rope.number("mscale_all_dim", default=0))
        latent = replace(latent, sharpness=scale**2)
    rotated = head_dim if latent is None else latent.rotated
    experts, routing = _experts(text, layers)
    # With latent attention RoPE rotates adjacent values, with ordinary heads the two halves.
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
    # null means no query latent. If the field is missing, the default is DeepSeek-V2's size.
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
            f"{text.where}: topk_group must be from 1 to n_group, and n_group must divide {count} "
            f"experts; they are {best} and {groups}"
        )
    if not 1 <= top <= count // groups * best or (method == "noaux_tc" and count < 2 * groups):
        raise CheckpointError(
            f"{text.where}: num_experts_per_tok {top} is not possible with {count} experts in "
            f"{groups} groups, of which {best} are used"
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
