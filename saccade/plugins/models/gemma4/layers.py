"""Reads the shapes of the language model's layers, which differ in Gemma 4, from `config.json`.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import read_layer_types

FULL, NEAR = "full_attention", "sliding_attention"
ROPES = {FULL: ("proportional", 1e6, 0.25), NEAR: ("default", 1e4, 1.0)}
"""For each attention type, the default RoPE type, base, and fraction of a head that is rotated."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's window and sizes, and the layer whose KV cache it reads."""

    window: int | None  # as in `AttentionShape`
    source: int  # the layer whose cached keys and values it reads: itself or an earlier one
    kv_heads: int
    head_dim: int
    same_values: bool  # values use the projection of keys
    intermediate: int


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding that rotates the fraction `share` of a head. Positions are divided by
    `factor`.
    """

    theta: float
    share: float
    factor: float


def read_layers(text: Section, heads: int) -> tuple[LayerShape, ...]:
    """Read each layer's shape. Raises CheckpointError."""
    count = text.layers("num_hidden_layers", default=30)
    kinds = _kinds(text, count)
    window = text.count("sliding_window", default=512)
    shared = text.integer("num_kv_shared_layers", default=0)
    if not 0 <= shared < count:
        raise CheckpointError(
            f"{text.where}: num_kv_shared_layers must be from 0 to {count - 1}, not {shared}"
        )
    same = text.flag("attention_k_eq_v")
    width = text.integer("intermediate_size", default=9216)
    wide = 2 if text.flag("use_double_wide_mlp") else 1
    found = []
    for at, kind in enumerate(kinds):
        own = at < count - shared
        kv_heads, dim = _head_sizes(text, at, kind, same)
        if heads % kv_heads or dim % 2:
            raise CheckpointError(
                f"{text.where}: layer {at}: {heads} query heads of {dim} values cannot share "
                f"{kv_heads} key/value heads evenly"
            )
        found.append(
            LayerShape(
                window=window if kind == NEAR else None,
                source=at if own else _source(text, kinds[: count - shared], kind),
                kv_heads=kv_heads,
                head_dim=dim,
                same_values=same and kind == FULL,
                intermediate=width if own else wide * width,
            )
        )
    if len({(each.window is None, each.head_dim) for each in found}) > len(set(kinds)):
        raise CheckpointError(f"{text.where}: layers of one type have different head_dim")
    return tuple(found)


def _kinds(text: Section, count: int) -> tuple[str, ...]:
    """Return the attention type of each layer. By default, every sixth layer has full attention.
    The last layer always does.
    """
    usual = tuple(NEAR if (at + 1) % 6 else FULL for at in range(count))
    return (*(read_layer_types(text, count, ROPES) or usual)[:-1], FULL)


def _source(text: Section, own: tuple[str, ...], kind: str) -> int:
    """Return the index of the last layer with this attention type that has its own KV cache."""
    if kind not in own:
        raise CheckpointError(
            f"{text.where}: num_kv_shared_layers leaves no layer of type {kind} with its own cache"
        )
    return len(own) - 1 - own[::-1].index(kind)


def _head_sizes(text: Section, at: int, kind: str, same: bool) -> tuple[int, int]:
    """Return the number of KV heads and the head size, from older or newer fields."""
    kv_heads = text.count("num_key_value_heads", default=4)
    dim = text.count("head_dim", default=256)
    if text.has("per_layer_config"):
        own = _own_fields(text.section("per_layer_config"), at)
        if others := sorted(own.data.keys() - {"head_dim", "num_key_value_heads"}):
            raise CheckpointError(f"{own.where}: {others[0]} is not supported per layer")
        kv_heads = own.count("num_key_value_heads", default=kv_heads)
        dim = own.count("head_dim", default=dim)
    elif kind == FULL:
        dim = text.count("global_head_dim", default=512)
        if same:
            kv_heads = text.count("num_global_key_value_heads", default=kv_heads)
    return kv_heads, dim


def _own_fields(layers: Section, at: int) -> Section:
    """Return the fields of one layer. Its key in the file may have leading zeros.

    Raises CheckpointError.
    """
    if strange := [key for key in layers.data if not key.isdecimal()]:
        raise CheckpointError(f"{layers.where}: {strange[0]!r} is not a layer index")
    return layers.section(next((key for key in layers.data if int(key) == at), str(at)))


def read_ropes(text: Section) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers with windows, and of layers with full attention.

    Raises CheckpointError.
    """
    if text.has("rope_scaling"):  # it would apply to all layers, instead of rope_parameters
        raise CheckpointError(f"{text.where}: rope_scaling is not supported: use rope_parameters")
    return _rope(text, NEAR), _rope(text, FULL)


def _rope(text: Section, kind: str) -> Rope:
    default, theta, share = ROPES[kind]
    given = text.section("rope_parameters")
    rope = given.section(kind)
    scaling = rope.text("rope_type", default="default" if rope.data else default)
    if scaling not in ("default", "linear", "proportional"):
        raise CheckpointError(
            f"{rope.where}: rope type {scaling!r} is not supported (default, linear and "
            "proportional are)"
        )
    if scaling == "proportional":
        share = rope.number("partial_rotary_factor", default=1.0 if rope.data else share)
    else:
        share = 1.0
    factor = rope.number("factor", default=1.0) if scaling != "default" else 1.0
    if factor <= 0 or not 0 < share <= 1:
        raise CheckpointError(
            f"{rope.where}: factor {factor} and partial_rotary_factor {share} are not supported"
        )
    return Rope(rope.positive("rope_theta", default=theta), share, factor)
