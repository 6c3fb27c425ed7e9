"""Reads from `quantization_config` in config.json how a checkpoint is quantized.

Supports block-wise FP8, compressed-tensors (int8, FP8 and packed integers), AWQ and GPTQ.
`scaled.py` and `packed.py` read the tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import QUANTIZATION_FIELDS as NAMES
from saccade.families.checkpoint import Section
from saccade.plugins.quantized.packed_layouts import Packed

SUPPORTED = (
    'fp8 (in blocks, with "weight_block_size"), compressed-tensors (8-bit int or float weights, '
    "symmetric, per tensor, channel, group or block; ints of 4 or 8 bits, pack-quantized, per "
    "channel or group), awq (4 bits, version gemm) and gptq (2, 4 or 8 bits)"
)
REMEDY = f"use the unquantized model, or one of the supported formats: {SUPPORTED}"

GPTQ_SHIFTS = {"gptq": 1, "gptq_v2": 0}
"""The number to add to stored zero points, by checkpoint_format."""
Stored = Literal["F8_E4M3", "I8"]
"""The dtypes of quantized weights, with safetensors' names."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices [out, in] of one group are quantized: value = stored * scale."""

    stored: Stored
    block: tuple[int, int]  # rows and columns that share a scale; 0 means all
    suffix: str  # the scales' name suffix, instead of `weight`
    # Whether the checkpoint expects activations to be quantized to int8, per token.
    int8_rows: bool = False

    def scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales for a matrix of this shape."""
        rows, columns = (-(-size // of) if of else 1 for size, of in zip(shape, self.block))
        return rows, columns


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which modules of a checkpoint are quantized, and how."""

    method: str
    # (targets, scheme). Targets are names or patterns of modules. The first group with a target
    # that matches is used, otherwise the group with the target "Linear".
    groups: tuple[tuple[tuple[str, ...], Scheme | Packed], ...]
    ignored: tuple[str, ...]  # modules that are not quantized

    def scheme(self, *names: str) -> Scheme | Packed | None:
        """Return how a module is quantized, or `None` if it is not.

        names: all names that config.json may use for the module.
        """
        if any(_means(target, name) for target in self.ignored for name in names):
            return None
        for targets, scheme in self.groups:
            if any(_means(target, name) for target in targets for name in names):
                return scheme
        return next((scheme for targets, scheme in self.groups if "Linear" in targets), None)

    def leftover(self, name: str) -> bool:
        """Return True if tensor `name` is a scale of activations or of the KV cache. These are
        ignored, since Saccade does not quantize them as the checkpoint specifies.
        """
        return name.endswith((".input_scale", ".output_scale", ".k_scale", ".v_scale"))


def read_quantization(config: Section) -> Quantization | None:
    """Read the quantization from config.json. Returns `None` for an unquantized checkpoint.

    Raises CheckpointError with the method or setting if it is not supported.
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
        case "awq":
            return _read_awq(settings)
        case "gptq":
            return _read_gptq(settings)
        case "gguf":
            raise CheckpointError(
                f"{settings.where}: the model is quantized (gguf): pass its *.gguf file, and the "
                f"file of its vision encoder as --mmproj, or use one of the supported formats: "
                f"{SUPPORTED}"
            )
        case method:
            raise CheckpointError(
                f"{settings.where}: the model is quantized ({method}), which is not supported; "
                f"{REMEDY}"
            )


def _refuse_nested(section: Section) -> None:
    """Raise CheckpointError if a nested section has its own quantization."""
    for name, value in section.data.items():
        if name in NAMES and value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise CheckpointError(
                f"{section.where}: {name}: a part of the model has separate quantization settings "
                f"({method}), which is not supported; {REMEDY}"
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
            f"{settings.where}: weight_block_size must be two positive integers, not {list(block)}"
        )
    scheme = Scheme("F8_E4M3", (block[0], block[1]), "weight_scale_inv")
    ignored = _names(settings, "modules_to_not_convert")
    return Quantization("fp8", ((("Linear",), scheme),), ignored)


def _read_awq(settings: Section) -> Quantization:
    bits = settings.integer("bits", "w_bit")
    version = settings.text("version", default="gemm").lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(
            f"{settings.where}: awq of {bits} bits, version {version!r}, is not supported; {REMEDY}"
        )
    if not settings.flag("zero_point", default=True):
        raise CheckpointError(
            f"{settings.where}: awq without zero points (zero_point false) is not supported; "
            f"{REMEDY}"
        )
    packed = Packed("awq", bits, _packed_group(settings, "group_size", "q_group_size"), zeros=True)
    ignored = _names(settings, "modules_to_not_convert")
    return Quantization("awq", ((("Linear",), packed),), ignored)


def _read_gptq(settings: Section) -> Quantization:
    bits = settings.integer("bits")
    form = settings.text("checkpoint_format", default="gptq")
    if bits not in (2, 4, 8) or form not in GPTQ_SHIFTS:
        raise CheckpointError(
            f"{settings.where}: gptq of {bits} bits, checkpoint_format {form!r}, is not supported; "
            f"{REMEDY}"
        )
    for name in ("dynamic", "is_marlin_format"):
        if settings.data.get(name):
            raise CheckpointError(f"{settings.where}: gptq with {name} is not supported; {REMEDY}")
    packed = Packed(
        "gptq",
        bits,
        _packed_group(settings, "group_size"),
        zeros=True,
        zero_shift=GPTQ_SHIFTS[form],
        order=settings.flag("desc_act"),
    )
    return Quantization("gptq", ((("Linear",), packed),), ())


def _packed_group(settings: Section, *names: str) -> int:
    """Return the group size (inputs per scale), or 0 if all inputs of an output share a scale."""
    size = settings.integer(*names)
    if size == 0 or size < -1:
        raise CheckpointError(f"{settings.where}: {names[0]} must be at least 1, or -1, not {size}")
    return max(0, size)


def _read_compressed(settings: Section) -> Quantization:
    for name in ("sparsity_config", "transform_config"):
        inner = settings.section(name)
        if inner.data and inner.data.get("format") != "dense":
            raise CheckpointError(f"{inner.where}: this is not supported; {REMEDY}")
    groups: list[tuple[tuple[str, ...], Scheme | Packed]] = []
    for name in settings.section("config_groups").data:
        group = settings.section("config_groups").section(name)
        form = group.text("format", default=settings.text("format", default="dense"))
        read = _read_packed if form == "pack-quantized" else _read_group
        groups.append((_names(group, "targets"), read(group)))
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


def _read_packed(group: Section) -> Packed:
    weights = group.section("weights")
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits")
    if kind != "int" or bits not in (4, 8):
        raise CheckpointError(
            f"{weights.where}: packed weights of {bits} bits ({kind}) are not supported; {REMEDY}"
        )
    strategy = weights.text("strategy", default="tensor")
    if strategy not in ("channel", "group"):
        raise CheckpointError(
            f"{weights.where}: strategy {strategy!r} of packed weights is not supported; {REMEDY}"
        )
    order = weights.text("actorder", default="none").lower()
    if order not in ("none", "weight", "static", "group", "dynamic"):
        raise CheckpointError(f"{weights.where}: actorder {order!r} is not supported; {REMEDY}")
    return Packed(
        "compressed-tensors",
        bits,
        _block(weights, strategy)[1],
        zeros=not weights.flag("symmetric", default=True),
        order=order in ("group", "dynamic"),
    )


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
    """Read a list of names and patterns.

    Raises CheckpointError if the list is malformed or a pattern is invalid.
    """
    values = section.data.get(field) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{section.where}: {field} must be a list of names, not {values!r}")
    for value in values:
        if value.startswith("re:"):
            try:
                re.compile(value.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(
                    f"{section.where}: {field}: {value!r} is not a valid pattern: {error}"
                ) from None
    return tuple(values)


def _means(target: str, name: str) -> bool:
    """Return True if `target` matches module `name`. `target` is a pattern, the module's full name,
    the full name of an enclosing module, or the last parts of the module's name.
    """
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return name == target or name.startswith(f"{target}.") or name.endswith(f".{target}")
