"""Matrix formats. Each defines the layout in memory, the padding, and which matmul of a backend
multiplies it.

A matrix is loaded in one format (`runtime/weights/checkpoint_weights.py`), padded if the device
requires it, packed once by `ready`, and then used for matmuls. Layers do not depend on the format.
Backends implement `MatmulOps` (`reference/ops.py` and its subclasses).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F

from saccade.kernels.reference.activation import Activation

FP8 = torch.float8_e4m3fn
MIN_FP8_GROUP = 16
"""An Fp8Matrix's number of inputs per scale is a multiple of this, the smallest depth of a tensor
core's matmul.
"""
MAX_UNQUANTIZED_ROWS = 16
"""Batches up to this size are not quantized to 8 bits. For 16 rows (19,456 x 2,560), an H200 takes
24 microseconds in 8 bits and 30 unquantized, with a fifteenth of the error. For 64 rows it takes 23
and 72.
"""
CHUNK = 128
"""Inputs of an Int4Matrix that are stored in adjacent words. Matrices are padded to a multiple of
this.
"""
EACH = 8
"""Values per word of an Int4Matrix."""


class Fp8Rows(NamedTuple):
    """Rows quantized to FP8: `rows[t, i] = values[t, i] * scales[t, i // group]`.

    Only the first `rows` rows are valid. The others are padding.
    """

    values: torch.Tensor  # FP8 [R, in]
    scales: torch.Tensor  # float32 [R, groups], column-major
    group: int  # inputs per scale
    rows: int
    dtype: torch.dtype  # dtype of the unquantized rows, and of matmul results

    def dense(self) -> torch.Tensor:
        """Return the dequantized rows in float32, without padding."""
        wide = self.values.float() * self.scales.repeat_interleave(self.group, 1)
        return wide[: self.rows]


Rows = torch.Tensor | Fp8Rows
"""The input of a matmul: [T, in]."""


class Fp8Experts(NamedTuple):
    """The FP8 matrices of E experts, each stored as an `Fp8Matrix`."""

    values: torch.Tensor  # FP8 [E, out, in]
    scales: torch.Tensor  # float32 [E, out, groups]
    group: int


Stack = torch.Tensor | Fp8Experts
"""One matrix per expert, as one tensor [E, out, in]: in the network's dtype, or in FP8."""


class MatmulOps(Protocol):
    """The matmuls that a backend implements.

    For rows x [T, in], each returns `x @ matrix.T + bias` [T, out], in x's dtype unless `dtype` is
    set.
    """

    @property
    def stacks(self) -> bool:
        """True if a layer's experts are stacked in one tensor."""
        ...

    def activate(self, x: torch.Tensor, activation: Activation, /) -> torch.Tensor: ...

    def prepack_dense(self, matrix: DenseMatrix, /) -> Matrix:
        """Return the matrix packed for this backend's matmuls."""
        ...

    def prepack_int8(self, matrix: Int8Matrix, /) -> Matrix:
        """Return the matrix packed for this backend's 8-bit matmuls."""
        ...

    def prepack_int4(self, matrix: Int4Matrix, /) -> Matrix:
        """Return the matrix packed for this backend's 4-bit matmuls."""
        ...

    def dense_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = "none",
        /,
    ) -> torch.Tensor:
        """Return `activation(x @ weight.T + bias)`, for a matrix from `prepack_dense`."""
        ...

    def int8_linear(
        self,
        x: torch.Tensor,
        matrix: Int8Matrix,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        /,
    ) -> torch.Tensor: ...

    def int4_linear(
        self, x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor: ...

    def fp8_linear(
        self, x: Rows, matrix: Fp8Matrix, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor: ...


class Matrix(ABC):
    """A weight [out, in] for matmuls, in any format.

    The defaults of these methods are for formats that are already packed when loaded, which do not
    support padding or stacking.
    """

    __slots__ = ()

    def pad_outputs(self, _sizes: Sequence[int], _more: int, /) -> Matrix:
        """Return the matrix with `_more` zero outputs after each part. Call this before `ready`.

        _sizes: the numbers of outputs of the parts that the matrix concatenates.
        """
        raise AssertionError(f"a {type(self).__name__} is packed")

    def pad_inputs(self, _more: int, /) -> Matrix:
        """Return the matrix with `_more` zero inputs at the end. Call this before `ready`."""
        raise AssertionError(f"a {type(self).__name__} is packed")

    def stack(self, _matrices: Sequence[Matrix], _ops: MatmulOps, /) -> Stack | None:
        """Return a layer's experts stacked in one tensor, or None if the backend does not support
        it.

        _matrices: the experts, of which this matrix is the first.
        """
        return None

    def ready(self, _ops: MatmulOps, /) -> Matrix:
        """Return the matrix packed for a backend. Other backends cannot read the result."""
        return self

    def rows_group(self) -> int:
        """Return the number of inputs per scale if large batches may be quantized to 8 bits, else
        0.
        """
        return 0

    @abstractmethod
    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Return `x @ matrix.T + bias` [T, out]. Call this on the result of `ready`.

        Only formats with a `rows_group` accept rows in 8 bits.
        """

    def product(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None, activation: Activation, /
    ) -> torch.Tensor:
        """Return `activation(x @ matrix.T + bias)`."""
        return ops.activate(self.multiply(ops, x, bias), activation)

    def logits(self, ops: MatmulOps, x: torch.Tensor, /) -> torch.Tensor:
        """Return `x @ matrix.T`, in float32 if that is the precision of the kernel."""
        return self.multiply(ops, x)

    def dense(self) -> torch.Tensor:
        """Return the matrix [out, in], dequantized or unpacked if necessary."""
        raise AssertionError(f"a {type(self).__name__} is not dense")


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix(Matrix):
    """A matrix in the network's dtype.

    values: [out, in], unless packed.
    """

    values: torch.Tensor

    def pad_outputs(self, sizes: Sequence[int], more: int, /) -> DenseMatrix:
        return DenseMatrix(_pad_parts(self.values, sizes, more))

    def pad_inputs(self, more: int, /) -> DenseMatrix:
        return DenseMatrix(F.pad(self.values, (0, more)))

    def stack(self, matrices: Sequence[Matrix], ops: MatmulOps, /) -> torch.Tensor | None:
        alike = [matrix.values for matrix in matrices if isinstance(matrix, DenseMatrix)]
        return torch.stack(alike) if ops.stacks and len(alike) == len(matrices) else None

    def ready(self, ops: MatmulOps, /) -> Matrix:
        return ops.prepack_dense(self)

    def dense(self) -> torch.Tensor:
        return self.values.to_dense() if self.values.is_mkldnn else self.values

    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return ops.dense_linear(whole_rows(x), self.values, bias)

    def product(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None, activation: Activation, /
    ) -> torch.Tensor:
        """Return `activation(x @ matrix.T + bias)`, computed by one kernel."""
        return ops.dense_linear(whole_rows(x), self.values, bias, activation)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix(Matrix):
    """An 8-bit matrix: `matrix[o, i]` is approximately `values[o, i] * scales[o]`."""

    values: torch.Tensor  # int8 [out, in], unless packed
    scales: torch.Tensor  # float32 [out]
    # the stored matrix is the Hadamard transform (`hadamard.py`) of the weight divided by the block
    # size, with inputs padded to complete blocks
    transformed: bool = False

    def ready(self, ops: MatmulOps, /) -> Matrix:
        return ops.prepack_int8(self)

    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return ops.int8_linear(whole_rows(x), self, bias)

    def logits(self, ops: MatmulOps, x: torch.Tensor, /) -> torch.Tensor:
        return ops.int8_linear(x, self, None, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix(Matrix):
    """An FP8 matrix: `matrix[o, i] = values[o, i] * scales[o, i // group]`."""

    values: torch.Tensor  # FP8 [out, in]
    scales: torch.Tensor  # float32 [out, groups]
    group: int  # inputs per scale, a multiple of `MIN_FP8_GROUP`; all inputs if there is one scale
    scaled: bool = False  # large batches may be quantized to 8 bits
    # for a `scaled` matrix with block scales: these scales in the format of `fp8.block_scales`
    blocks: torch.Tensor | None = None

    def pad_outputs(self, sizes: Sequence[int], more: int, /) -> Fp8Matrix:
        values = _pad_parts(self.values.view(torch.uint8), sizes, more).view(FP8)
        return replace(self, values=values, scales=_pad_parts(self.scales, sizes, more))

    def pad_inputs(self, more: int, /) -> Fp8Matrix:
        inputs = self.values.shape[1]
        padded = F.pad(self.values.view(torch.uint8), (0, more)).view(FP8)
        if self.group == inputs:
            return replace(self, values=padded, group=inputs + more)
        groups = -(-(inputs + more) // self.group)
        scales = F.pad(self.scales, (0, groups - self.scales.shape[1])).contiguous()
        return replace(self, values=padded, scales=scales)

    def stack(self, matrices: Sequence[Matrix], _ops: MatmulOps, /) -> Fp8Experts | None:
        alike = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
        if len(alike) < len(matrices) or len({each.group for each in alike}) > 1:
            return None
        values = torch.stack([each.values.view(torch.uint8) for each in alike]).view(FP8)
        return Fp8Experts(values, torch.stack([each.scales for each in alike]), self.group)

    def rows_group(self) -> int:
        outputs, inputs = self.values.shape
        if not self.scaled or outputs % MIN_FP8_GROUP or inputs % MIN_FP8_GROUP:
            return 0
        return self.group if self.group == inputs or self.blocks is not None else 0

    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return ops.fp8_linear(x, self, bias)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix(Matrix):
    """A 4-bit matrix. Its packed numbers are in `words`.

    matrix[o, order[i]] = (number[o, i] - zeros[i // group, o]) * scales[i // group, o]
    """

    # int32 [out, chunks * 16], where a chunk has 128 inputs. In word j of a chunk, for p from 0 to
    # 3, bits 4 p to 4 p + 3 have the number for input 32 p + 2 j of the chunk, and the bits 16
    # above have the number for the next input. A shift and a mask therefore extract two adjacent
    # inputs.
    words: torch.Tensor
    scales: torch.Tensor  # [groups, out] in the checkpoint's own float dtype
    # uint8 [groups, out], 0 to 16, or arbitrary float32 values if only CPUs use the matrix. `None`:
    # all are `int4.ZERO_POINT`. Values for padding inputs are arbitrary.
    zeros: torch.Tensor | None
    # inputs per scale, a multiple of `int4.MIN_GROUP`; the padded number of inputs if there is one
    group: int
    inputs: int  # without padding
    # int64 [inputs]: the input that is stored at position i; `None`: in order
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return bytes_of(self.words, self.scales, self.zeros, self.order)

    def pad_outputs(self, sizes: Sequence[int], more: int, /) -> Int4Matrix:
        def widen(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([F.pad(part, (0, more)) for part in values.split([*sizes], 1)], 1)

        zeros = None if self.zeros is None else widen(self.zeros)
        words = _pad_parts(self.words, sizes, more)
        return replace(self, words=words, scales=widen(self.scales), zeros=zeros)

    def pad_inputs(self, more: int, /) -> Int4Matrix:
        """Return the matrix with `more` additional inputs. Rows must have the value 0 there."""
        scales, zeros, order = self.scales, self.zeros, self.order
        now = self.inputs + more
        chunks = -(-now // CHUNK)
        group = chunks * CHUNK if len(scales) == 1 else self.group
        groups = -(-chunks * CHUNK // group) - len(scales)
        if order is not None:
            order = torch.cat((order, torch.arange(self.inputs, now).to(order)))
        return Int4Matrix(
            F.pad(self.words, (0, chunks * CHUNK // EACH - self.words.shape[1])),
            F.pad(scales, (0, 0, 0, groups)),
            None if zeros is None else F.pad(zeros, (0, 0, 0, groups)),
            group,
            now,
            order,
        )

    def ready(self, ops: MatmulOps, /) -> Matrix:
        return ops.prepack_int4(self)

    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        return ops.int4_linear(whole_rows(x), self, bias)


def whole_rows(x: Rows) -> torch.Tensor:
    """Return `x`, and assert that it is not quantized."""
    assert isinstance(x, torch.Tensor), "rows in 8 bits are for matrices that want these"
    return x


def _pad_parts(values: torch.Tensor, sizes: Sequence[int], more: int) -> torch.Tensor:
    return torch.cat([F.pad(part, (0, 0, 0, more)) for part in values.split([*sizes])])


def bytes_of(*tensors: torch.Tensor | None) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
