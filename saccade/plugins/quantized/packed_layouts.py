"""Layouts that pack several few-bit numbers into each int32: AWQ, GPTQ, and compressed-tensors'
pack-quantized.

Owns the names and shapes of the tensors that make up one matrix. Leaves config.json to
`quantization.py` and numbers to `unpack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["compressed-tensors", "gptq", "awq"]
Role = Literal["values", "scales", "zeros", "order", "shape"]
"""order: each input's group. shape: rows and columns of the matrix."""

FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32", "I64")
SUFFIXES: dict[Layout, dict[Role, str]] = {
    "compressed-tensors": {
        "values": "weight_packed",
        "scales": "weight_scale",
        "zeros": "weight_zero_point",
        "order": "weight_g_idx",
        "shape": "weight_shape",
    },
    "gptq": {"values": "qweight", "scales": "scales", "zeros": "qzeros", "order": "g_idx"},
    "awq": {"values": "qweight", "scales": "scales", "zeros": "qzeros"},
}
"""The names in place of `weight`."""


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """One stored tensor.

    stored: the formats that it may have, by safetensors' names.
    """

    suffix: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """value[o, i] = (stored[o, i] - zero[o, g]) * scale[o, g], g being input i's group."""

    layout: Layout
    bits: int
    group: int  # neighbouring inputs that share a scale. 0: all.
    zeros: bool  # zero points are stored. Otherwise each is the middle.
    zero_shift: int = 0  # added to stored zero points
    order: bool = False  # each input's group must be stored. Otherwise it may be.

    @property
    def values_suffix(self) -> str:
        return SUFFIXES[self.layout]["values"]

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def pieces(self, outputs: int, inputs: int) -> dict[Role, PackedPiece]:
        """Return the tensors that make up a matrix [outputs, inputs]."""
        each = 32 // self.bits
        count = self.groups(inputs)
        few_in, few_out = -(-inputs // each), -(-outputs // each)
        values: dict[Layout, tuple[int, int]] = {
            "compressed-tensors": (outputs, few_in),
            "gptq": (few_in, outputs),
            "awq": (inputs, few_out),
        }
        turned = self.layout == "compressed-tensors"
        shapes: dict[Role, tuple[int, ...]] = {
            "values": values[self.layout],
            "scales": (outputs, count) if turned else (count, outputs),
            "zeros": (few_out, count) if turned else (count, few_out),
            "order": (inputs,),
            "shape": (2,),
        }
        found: dict[Role, PackedPiece] = {}
        for role, suffix in SUFFIXES[self.layout].items():
            if role == "zeros" and not self.zeros:
                continue
            if role == "order" and turned and not self.order:
                continue
            stored = {"values": ("I32",), "zeros": ("I32",), "scales": FLOATS}.get(role, INTEGERS)
            optional = (role == "order" and not self.order) or role == "shape"
            found[role] = PackedPiece(suffix, shapes[role], stored, optional)
        return found
