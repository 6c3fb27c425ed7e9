"""Operations for x86 CPUs in any dtype: compiled GEMMs with 4- and 8-bit weights, and PyTorch for
everything else. The first matrix with 4- or 8-bit weights imports `vnni_layout.py`, which calls the
kernels.
"""

from __future__ import annotations

import torch

from saccade.kernels.matrix import Int4Matrix, Int8Matrix, Matrix
from saccade.kernels.processor import has_vnni
from saccade.kernels.reference.ops import Ops


def quantise_int8(weight: torch.Tensor) -> Int8Matrix:
    if not (has_vnni() and weight.numel()):
        return Ops.quantise_int8(weight)
    from saccade.plugins.cpu.vnni_layout import quantise_outputs

    return Int8Matrix(*quantise_outputs(weight), transformed=True)


def prepack_int8(matrix: Int8Matrix) -> Matrix:
    if not (has_vnni() and matrix.values.shape[1]):
        return Ops.prepack_int8(matrix)
    from saccade.plugins.cpu.vnni_layout import pack_int8

    return pack_int8(matrix)


def prepack_int4(matrix: Int4Matrix) -> Matrix:
    if not has_vnni():
        return matrix
    from saccade.plugins.cpu.vnni_layout import pack_panels

    return pack_panels(matrix)


class QuantizedOps(Ops):
    """PyTorch's operations, with compiled GEMMs for 4- and 8-bit weights."""

    @property
    def takes_int4(self) -> bool:
        return has_vnni()

    quantise_int8 = staticmethod(quantise_int8)
    prepack_int8 = staticmethod(prepack_int8)
    prepack_int4 = staticmethod(prepack_int4)
