"""Reads the configuration of the hybrid language model in Qwen3.5 and MiniCPM-V 4.6.

This covers the sizes in `config.json`, the cached values per token and per sequence, and how they
are divided among ranks. `hybrid_decoder.py` builds the model. Runs without torch.
"""

from __future__ import annotations

from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.core.family import AttentionShape, Cache, Divisible, heads_cache
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import (
    experts_config,
    read_heads,
    read_layer_types,
    read_rope,
    read_theta,
    refuse_unsupported,
)
from saccade.nn.shapes import RopeConfig, TextConfig
from saccade.plugins.models.kit.hybrid_config import DeltaConfig, HybridConfig

FULL, LINEAR = "full_attention", "linear_attention"


def read_hybrid(
    config: Section, text: Section, axes: Literal[1, 3] = 3
) -> tuple[TextConfig, HybridConfig]:
    """Read the language model from `text`, its section of `config`.

    `axes` is the number of axes of rotary positions. Raises CheckpointError.
    """
    refuse_unsupported(text, "attention_bias")
    if not text.flag("attn_output_gate", default=True):
        raise CheckpointError(f"{text.where}: attn_output_gate false is not supported")
    heads, kv_heads = read_heads(text)
    head_dim = text.count("head_dim", default=256)
    rope, rotary_dim = _rope(text, head_dim, axes)
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


def hybrid_caches(
    text: TextConfig, hybrid: HybridConfig, ranks: int
) -> tuple[AttentionShape | tuple[Cache, ...], ...]:
    """Return what each layer caches on one of `ranks` ranks: keys and values per token, or a state
    per sequence.
    """
    delta = hybrid.delta
    shape = (delta.value_heads // ranks, delta.key_dim, delta.value_dim)
    channels = (2 * delta.keys + delta.values) // ranks
    full = heads_cache(text.kv_heads, text.head_dim, ranks)
    linear = (
        Cache("recurrent", shape, "sequence", "float32"),
        Cache("conv", (delta.taps - 1, channels), "sequence"),
    )
    return tuple(full if is_full else linear for is_full in hybrid.full)


def hybrid_cuts(text: TextConfig, delta: DeltaConfig) -> Divisible:
    """Return the sizes that must be divisible by the number of ranks."""
    return (
        (text.heads, "attention heads"),
        (delta.key_heads, "linear attention key heads"),
        (delta.value_heads, "linear attention value heads"),
        (text.intermediate, "MLP values"),
    )


def _layers(text: Section, count: int) -> tuple[bool, ...]:
    if names := read_layer_types(text, count, (FULL, LINEAR)):
        full = tuple(name == FULL for name in names)
    else:
        interval = text.count("full_attention_interval", default=4)
        full = tuple((layer + 1) % interval == 0 for layer in range(count))
    if not any(full):
        source = "layer_types" if names else "full_attention_interval"
        raise CheckpointError(
            f"{text.where}: by {source}, no layer has {FULL}, which is not supported"
        )
    return full


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


def _rope(text: Section, head_dim: int, axes: int) -> tuple[RopeConfig, int]:
    """Return the rotary embedding's configuration, and the number of values of a head that it
    rotates.
    """
    rope = read_rope(text)
    part = rope.number(
        "partial_rotary_factor", default=text.number("partial_rotary_factor", default=0.25)
    )
    rotated = int(head_dim * part) if 0 < part <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"{rope.where}: partial_rotary_factor {part} of {head_dim} values is not supported "
            "(it must give an even number of values, at most a head's)"
        )
    theta = read_theta(text, rope)
    if axes == 1:
        return RopeConfig(theta, (rotated // 2,), interleaved=False), rotated
    sections = rope.integers("mrope_section", default=(11, 11, 10))
    if len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != rotated:
        raise CheckpointError(
            f"{rope.where}: mrope_section {list(sections)} must be three numbers that sum to "
            f"{rotated // 2}"
        )
    return RopeConfig(theta, (sections[0], sections[1], sections[2]), interleaved=True), rotated
