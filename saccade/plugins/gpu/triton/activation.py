"""Activations of gated MLPs as device functions: SiLU, and GELU with the tanh approximation. They
compute on values in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.reference import activation

GATES = ("silu", "gelu_tanh")
"""The activations that `activated` supports."""
SLOPE = tl.constexpr(activation.SLOPE)


@triton.jit
def activated(x, tanh: tl.constexpr):
    """silu(x) of float32, or `activation.gelu_tanh(x)` if `tanh` is set."""
    slope = x
    if tanh:
        slope = (x * x * 0.044715 + 1.0) * x * SLOPE
    return x * tl.sigmoid(slope)
