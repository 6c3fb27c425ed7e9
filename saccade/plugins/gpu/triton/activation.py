"""What gates take, as a part of kernels: SiLU, and GELU with the tanh approximation. Works on
values in registers, wherever their tensors lie.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.reference import activation

GATES = ("silu", "gelu_tanh")
"""Those that `activated` knows."""
SLOPE = tl.constexpr(activation.SLOPE)


@triton.jit
def activated(x, tanh: tl.constexpr):
    """silu(x) of float32, or with `tanh` `activation.gelu_tanh(x)`."""
    slope = x
    if tanh:
        slope = (x * x * 0.044715 + 1.0) * x * SLOPE
    return x * tl.sigmoid(slope)
