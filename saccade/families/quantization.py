"""How config.json says that a checkpoint's matrices are quantised: block-wise FP8, and
compressed-tensors in int8 or FP8.

Owns the reading of `quantization_config` and the wording of what is refused. Knows nothing of
tensors: `runtime/quantized.py` reads those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section

NAMES = ("quantization_config", "compression_config")
"""Where config.json says it; the second is the older name."""
SUPPORTED = (
    'supported are fp8 (in blocks, "weight_block_size") and compressed-tensors (8-bit int or '
    "float weights, symmetric; per tensor, channel, group or block)"
)
REMEDY = f"{SUPPORTED}: use such a checkpoint, or the model's unquantised one"

Stored = Literal["F8_E4M3", "I8"]
"""Formats of quantised weights, as safetensors calls them."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices [out, in] of one group are stored: value = stored * scale.

    block: rows and columns that share a scale; 0: all of them. suffix: what the scale is called, in
    place of `weight`. int8_rows: made for products with rows that are quantised to int8, each by
    its own largest value.
    """

    stored: Stored
    block: tuple[int, int]
    suffix: str
    int8_rows: bool = False

    def scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix of that shape."""
        rows, columns = (-(-size // of) if of else 1 for size, of in zip(shape, self.block))
        return rows, columns


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which matrices are quantised, and how. `groups`: (names or patterns, scheme); the first that
    names a module holds, else the one that means every linear layer. `ignored`: modules that are
    not.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...]

    def scheme(self, *names: str) -> Scheme | None:
        """How the module of these names is stored; None where it is not quantised."""
        if any(_means(target, name) for target in self.ignored for name in names):
            return None
        for targets, scheme in self.groups:
            if any(_means(target, name) for target in targets for name in names):
                return scheme
        return next((scheme for targets, scheme in self.groups if "Linear" in targets), None)

    def leftover(self, name: str) -> bool:
        """Whether tensor `name` belongs to a scheme's activations or KV cache, which are not
        quantised as the checkpoint would have it.
        """
        return name.endswith((".input_scale", ".output_scale", ".k_scale", ".v_scale"))


def read_quantization(config: Section) -> Quantization | None:
    """What config.json says; None for a checkpoint that is not quantised.

    Raises CheckpointError for a method or a setting that is not supported, by name.
    """
    for name, value in config.data.items():
        if name not in NAMES and isinstance(value, dict):
            _refuse_nested(config.section(name))
    settings = next((config.section(name) for name in NAMES if config.has(name)), None)
    if settings is None:
        return None
    match settings.text("quant_method", default="no method named"):
        case "fp8":
            return _read_fp8(settings)
        case "compressed-tensors":
            return _read_compressed(settings)
        case "gguf":
            raise CheckpointError(
                f"{settings.where}: the model is quantised (gguf), which is llama.cpp's format; "
                f"{REMEDY}"
            )
        case method:
            raise CheckpointError(
                f"{settings.where}: the model is quantised ({method}), which is not supported; "
                f"{REMEDY}"
            )


def _refuse_nested(section: Section) -> None:
    """Raises CheckpointError for quantisation that holds for a part of the model only."""
    for name, value in section.data.items():
        if name in NAMES and value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise CheckpointError(
                f"{section.where}: {name}: a part of the model is quantised ({method}) by settings "
                f"of its own, which is not supported; at the top of config.json, {REMEDY}"
            )
        if isinstance(value, dict):
            _refuse_nested(section.section(name))


def _read_fp8(settings: Section) -> Quantization:
    if not settings.has("weight_block_size"):
        raise CheckpointError(
            f"{settings.where}: fp8 without weight_block_size is not supported; {REMEDY}"
        )
    block = settings.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise CheckpointError(
            f"{settings.where}: weight_block_size must be rows and columns, not {list(block)}"
        )
    scheme = Scheme("F8_E4M3", (block[0], block[1]), "weight_scale_inv")
    ignored = _names(settings, "modules_to_not_convert")
    return Quantization("fp8", ((("Linear",), scheme),), ignored)


def _read_compressed(settings: Section) -> Quantization:
    for name in ("sparsity_config", "transform_config"):
        inner = settings.section(name)
        if inner.data and inner.data.get("format") != "dense":
            raise CheckpointError(f"{inner.where}: it is not supported; {REMEDY}")
    groups = []
    for name in settings.section("config_groups").data:
        group = settings.section("config_groups").section(name)
        groups.append((_names(group, "targets"), _read_group(group)))
    if not groups:
        raise CheckpointError(f"{settings.where}: config_groups is missing")
    return Quantization("compressed-tensors", tuple(groups), _names(settings, "ignore"))


def _read_group(group: Section) -> Scheme:
    weights = group.section("weights")
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits")
    stored: Stored
    if (kind, bits) == ("int", 8):
        stored = "I8"
    elif (kind, bits) == ("float", 8):
        stored = "F8_E4M3"
    else:
        raise CheckpointError(
            f"{weights.where}: weights of {bits} bits ({kind}) are not supported; {REMEDY}"
        )
    if group.text("format", default="") == "pack-quantized":
        raise CheckpointError(
            f"{group.where}: format pack-quantized is not supported for 8 bits; {REMEDY}"
        )
    if not weights.flag("symmetric", default=True):
        raise CheckpointError(f"{weights.where}: zero points are not supported; {REMEDY}")
    if weights.has("actorder"):
        raise CheckpointError(
            f"{weights.where}: actorder {weights.data['actorder']!r} is not supported; {REMEDY}"
        )
    strategy = weights.text("strategy", default="tensor")
    rows = group.section("input_activations")
    int8_rows = (
        (stored, strategy) == ("I8", "channel")
        and rows.has("num_bits")
        and (rows.integer("num_bits"), rows.text("type", default="int")) == (8, "int")
        and rows.data.get("dynamic") is True
        and rows.text("strategy", default="tensor") == "token"
        and rows.flag("symmetric", default=True)
    )
    return Scheme(stored, _block(weights, strategy), "weight_scale", int8_rows)


def _block(weights: Section, strategy: str) -> tuple[int, int]:
    match strategy:
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group":
            block = (1, weights.integer("group_size"))
        case "block":
            sizes = weights.integers("block_structure")
            block = (sizes[0], sizes[-1])
        case other:
            raise CheckpointError(f"{weights.where}: strategy {other!r} is not supported; {REMEDY}")
    if min(block) < 1:
        raise CheckpointError(f"{weights.where}: strategy {strategy} needs sizes of at least 1")
    return block


def _names(section: Section, field: str) -> tuple[str, ...]:
    """A list of names and patterns. Raises CheckpointError where a pattern is none."""
    values = section.data.get(field) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{section.where}: {field} must be a list of names, not {values!r}")
    for value in values:
        if value.startswith("re:"):
            try:
                re.compile(value.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(
                    f"{section.where}: {field}: {value!r} is no pattern: {error}"
                ) from None
    return tuple(values)


def _means(target: str, name: str) -> bool:
    """Whether `target` names module `name`, something that holds that, or its last parts."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return name == target or name.startswith(f"{target}.") or name.endswith(f".{target}")
