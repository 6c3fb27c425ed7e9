"""A network's kinds of matrices: layout in memory, padding, and each kind's product on a backend.

A matrix is loaded as one kind (`runtime/weights/checkpoint_weights.py`), padded if a device wants
padding, made ready once, and multiplied from then on. Holders never ask for the kind. Owns what
fields mean. Leaves computing to backends: `MatmulOps` is what matrices demand from one
(`reference/ops.py` and its siblings).
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
"""Inputs of an Fp8Matrix that share a scale divide by this, as a product on tensor cores has so
many at least.
"""
MAX_UNQUANTIZED_ROWS = 16
"""Rows of a product up to which they are not made 8 bits. An H200 takes 24 microseconds for 16 rows
in 8 bits and 30 for unchanged ones (19,456 x 2,560), whose error is fifteen times less. For 64 it
takes 23 and 72.
"""
CHUNK = 128
"""Inputs of an output of an Int4Matrix that lie in neighbouring words; matrices are padded to whole
chunks.
"""
EACH = 8
"""Numbers of a word of an Int4Matrix."""


class Fp8Rows(NamedTuple):
    """Rows in FP8 with scales: `rows[t, i] = values[t, i] * scales[t, i // group]`.

    This holds for the first `rows` rows; others pad, and hold anything.
    """

    values: torch.Tensor  # FP8 [R, in]
    scales: torch.Tensor  # float32 [R, groups], with one group's rows back to back
    group: int
    rows: int
    dtype: torch.dtype  # that of the rows before, and of their products

    def dense(self) -> torch.Tensor:
        """Return the rows in float32."""
        wide = self.values.float() * self.scales.repeat_interleave(self.group, 1)
        return wide[: self.rows]


Rows = torch.Tensor | Fp8Rows
"""The input of a matmul: [T, in]."""


class Fp8Experts(NamedTuple):
    """E experts' matrices, each as in an Fp8Matrix."""

    values: torch.Tensor  # FP8 [E, out, in]
    scales: torch.Tensor  # float32 [E, out, groups]
    group: int


Stack = torch.Tensor | Fp8Experts
"""One matrix for each expert: [E, out, in] in the network's dtype, or in FP8."""


class MatmulOps(Protocol):
    """What matrices demand from a backend.

    Each product with rows x [T, in] is `x @ matrix.T + bias`, [T, out] in x's dtype (or in
    `dtype`).
    """

    @property
    def stacks(self) -> bool:
        """Return True if a layer's experts are one tensor."""
        ...

    def activate(self, x: torch.Tensor, activation: Activation, /) -> torch.Tensor: ...

    def prepack_dense(self, matrix: DenseMatrix, /) -> Matrix:
        """Return the matrix laid out for this backend's products."""
        ...

    def prepack_int8(self, matrix: Int8Matrix, /) -> Matrix:
        """Return the matrix laid out for this backend's 8-bit products."""
        ...

    def prepack_int4(self, matrix: Int4Matrix, /) -> Matrix:
        """Return the matrix laid out for this backend's 4-bit products."""
        ...

    def dense_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation = "none",
        /,
    ) -> torch.Tensor:
        """Return the activation of the product with a laid out matrix's values."""
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
    """A weight [out, in] for products.

    The methods here suit a matrix packed at load, a CPU's: without padding, and with experts one by
    one.
    """

    __slots__ = ()

    def pad_outputs(self, _sizes: Sequence[int], _more: int, /) -> Matrix:
        """Return the matrix with `more` zero outputs after each part.

        sizes: the parts' outputs; parts are stacked. Call before `ready`.
        """
        raise AssertionError(f"a {type(self).__name__} is packed")

    def pad_inputs(self, _more: int, /) -> Matrix:
        """Return the matrix with `more` zero inputs after its own. Call before `ready`."""
        raise AssertionError(f"a {type(self).__name__} is packed")

    def stack(self, _matrices: Sequence[Matrix], _ops: MatmulOps, /) -> Stack | None:
        """Stack a layer's experts, this matrix first, into one tensor.

        Returns `None` if the backend lacks products with such tensors.
        """
        return None

    def ready(self, _ops: MatmulOps, /) -> Matrix:
        """Return the matrix in the form for the given backend's products alone."""
        return self

    def rows_group(self) -> int:
        """Return how many inputs share a scale, if products with many rows take rows in 8 bits;
        else 0.
        """
        return 0

    @abstractmethod
    def multiply(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Return `x @ matrix.T + bias` [T, out]. Call once the matrix is ready.

        Rows in 8 bits are for matrices that want 8 bits.
        """

    def product(
        self, ops: MatmulOps, x: Rows, bias: torch.Tensor | None, activation: Activation, /
    ) -> torch.Tensor:
        """Return `activation(x @ matrix.T + bias)`."""
        return ops.activate(self.multiply(ops, x, bias), activation)

    def logits(self, ops: MatmulOps, x: torch.Tensor, /) -> torch.Tensor:
        """Return `x @ matrix.T`, in float32 if the product is made in float32."""
        return self.multiply(ops, x)

    def dense(self) -> torch.Tensor:
        """Return [out, in], made anew if need be."""
        raise AssertionError(f"a {type(self).__name__} is not dense")


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix(Matrix):
    """A matrix in the network's dtype. values: [out, in], until laid out."""

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
        """Apply the activation where the product is made."""
        return ops.dense_linear(whole_rows(x), self.values, bias, activation)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix(Matrix):
    """An 8-bit matrix: `matrix[o, i]` is about `values[o, i] * scales[o]`."""

    values: torch.Tensor  # int8 [out, in], until laid out
    scales: torch.Tensor  # float32 [out]
    # inputs are in whole blocks of `hadamard.py`, and this is the transform of a matrix, divided by
    # the inputs of a block
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
    group: int  # inputs per scale, a multiple of `MIN_FP8_GROUP`; all inputs for a single group
    scaled: bool = False  # products with many rows may take rows in 8 bits
    # the scales then read if weights have scales in blocks, from `fp8.block_scales`
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
    """A matrix with 4-bit numbers:

    matrix[o, order[i]] = (number[o, i] - zeros[i // group, o]) * scales[i // group, o]
    """

    # int32 [out, chunks * 16], a chunk being 128 inputs. In a chunk's word j, bits 4 p to 4 p + 3
    # (p from 0 to 3) are the number for the chunk's input 32 p + 2 j, and the bits 16 above are the
    # next input's: so a shift and a mask make two neighbours with 16 bits each.
    words: torch.Tensor
    scales: torch.Tensor  # [groups, out] in the checkpoint's own float format
    # uint8 [groups, out], 0 to 16, or any float32 in a matrix that CPUs alone multiply; `None`: all
    # are `int4.MIDDLE`. Padding inputs may have any, multiplied by 0.
    zeros: torch.Tensor | None
    # inputs per scale, a multiple of `int4.MIN_GROUP`; all, in whole chunks, for a single group
    group: int
    inputs: int  # without padding
    # int64 [inputs], the matrix's input at the layout's i-th place; `None`: in order
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
        """Add padding inputs, for rows with 0 in the same places."""
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
    """Return rows that are not in 8 bits."""
    assert isinstance(x, torch.Tensor), "rows in 8 bits are for matrices that want these"
    return x


def _pad_parts(values: torch.Tensor, sizes: Sequence[int], more: int) -> torch.Tensor:
    """Pad values [out, ...] with `more` zero outputs after each part. sizes: the parts' outputs."""
    return torch.cat([F.pad(part, (0, 0, 0, more)) for part in values.split([*sizes])])


def bytes_of(*tensors: torch.Tensor | None) -> int:
    """Count the tensors' bytes."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
