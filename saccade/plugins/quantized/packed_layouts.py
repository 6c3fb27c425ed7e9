"""The layouts of quantized matrices that pack several values into each int32: AWQ, GPTQ, and
compressed-tensors' pack-quantized. This module defines the names and shapes of the tensors that
store one matrix.

`quantization.py` reads config.json, and `unpack.py` unpacks the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["compressed-tensors", "gptq", "awq"]
Role = Literal["values", "scales", "zeros", "order", "shape"]
"""What a stored tensor contains. "order" is the group of each input, and "shape" the number of rows
and columns of the matrix.
"""

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
"""For each layout, the name suffixes of the tensors that replace `weight`."""


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """One stored tensor of a packed matrix."""

    suffix: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]  # allowed dtypes (safetensors' names)
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """How a packed matrix is quantized: value[o, i] = (stored[o, i] - zero[o, g]) * scale[o, g],
    where g is the group of input i.
    """

    layout: Layout
    bits: int
    group: int  # consecutive inputs that share a scale; 0 means all inputs
    zeros: bool  # whether zero points are stored; otherwise they are 2 ** (bits - 1)
    zero_shift: int = 0  # added to stored zero points
    order: bool = False  # whether each input's group must be stored; otherwise it is optional

    @property
    def values_suffix(self) -> str:
        return SUFFIXES[self.layout]["values"]

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def pieces(self, outputs: int, inputs: int) -> dict[Role, PackedPiece]:
        """Return the shapes and dtypes of the tensors that store a matrix [outputs, inputs], by
        role.
        """
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
