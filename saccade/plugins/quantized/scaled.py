"""Loads matrices in 8 bits with scales (FP8, compressed-tensors). They are checked, and then
dequantized, or kept in 8 bits for a device that has a kernel for them.

`quantization.py` determines which scales a matrix has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from saccade.core.errors import CheckpointError
from saccade.kernels.matrix import (
    FP8,
    MIN_FP8_GROUP,
    Fp8Experts,
    Fp8Matrix,
    Int8Matrix,
    Matrix,
)
from saccade.kernels.reference.fp8 import prepare
from saccade.nn.weights import Part
from saccade.plugins.quantized.quantization import Scheme
from saccade.runtime.weights.quant_policy import Kind
from saccade.runtime.weights.stored import FORMATS, LoadContext, StoredTensor, check_shape

BLOCK_VALUES = 1 << 20
"""Number of values that are dequantized at a time. Intermediate results are float32."""


class ScaledTensor(StoredTensor):
    """A matrix, or the matrices of all experts as one tensor: value = stored * scale."""

    __slots__ = ("scheme",)

    def __init__(self, loading: LoadContext, name: str, scheme: Scheme) -> None:
        super().__init__(loading, name)
        self.scheme = scheme

    def check(self, part: Part) -> None:
        check_shape(self.loading.files, part, FORMATS | {self.scheme.stored})

    def restore(self, part: Part, target: torch.Tensor) -> None:
        piece = self.loading.files.read_slice(part)
        _multiply(piece, self.scales(part), target)
        self.loading.policy.tally.count_restored(piece.nbytes, target)
        self.check_finite(target)
        self.loading.gauge.update(piece.nbytes)

    def check_scales(self, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError if a tensor's scales are missing, or have an unsupported format or
        shape.

        shape: the shape of the tensor.
        """
        files, scheme = self.loading.files, self.scheme
        if len(shape) not in (2, 3):
            raise files.wrong(
                self.name,
                f"is {list(shape)}: only matrices, and those of experts, are read in 8 bits",
            )
        scales = scales_name(self.name, scheme)
        if scales not in files:
            path, name = files.locate(self.name)
            raise CheckpointError(
                f"{path}: no file has the tensor {scales_name(name, scheme)}, the scales of "
                f"{name}: the checkpoint is incomplete"
            )
        kind, found = files.describe(scales)
        if kind not in FORMATS:
            raise files.wrong(scales, f"is stored as {kind}; scales are F32, F16 or BF16")
        wanted = (*shape[:-2], *scheme.scales((shape[-2], shape[-1])))
        accepted = [wanted]
        if wanted[-1] == 1:
            accepted.append(wanted[:-1])
        if wanted[-2:] == (1, 1):
            accepted.append(wanted[:-2])
        if found not in accepted:
            raise files.misshapen(scales, found, wanted)

    def scales(self, part: Part) -> torch.Tensor:
        """Read the scales of a slice to the device: float32 [..., rows or 1, columns or 1].

        Raises CheckpointError as `check_scales` does, and for scales that are not finite.
        """
        self.check_scales(part.shape)
        files, name = self.loading.files, scales_name(self.name, self.scheme)
        files.mark_asked([name])
        shape = (*part.shape[:-2], *self.scheme.scales((part.shape[-2], part.shape[-1])))
        scales = files.read_slice(Part(name, shape)).float().view(shape)
        if not scales.isfinite().all():
            raise files.wrong(name, "has values that are not finite: the checkpoint is damaged")
        return _cut_scales(scales, part, self.scheme).to(self.loading.device)

    def product_kind(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Kind | None:
        scaled = [each for each in stored if isinstance(each, ScaledTensor)]
        if len(scaled) < len(parts):
            return None
        if self._fp8_group(scaled, parts) is not None:
            return "fp8"
        policy = self.loading.policy
        rows = all(each.scheme.int8_rows and policy.projection(each.name) for each in scaled)
        return "int8" if policy.native and rows else None

    def product(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Matrix | None:
        if (kind := self.product_kind(stored, parts)) is None:
            return None
        scaled = [each for each in stored if isinstance(each, ScaledTensor)]
        group = self._fp8_group(scaled, parts)
        if kind == "fp8" and group is not None:
            return self._join_fp8(scaled, parts, group)
        pieces, scales = _read_all(scaled, parts)
        matrix = Int8Matrix(torch.cat(pieces), torch.cat(scales).flatten())
        self.loading.policy.tally.count_int8(matrix, self.loading.dtype.itemsize)
        self.loading.gauge.update(sum(piece.nbytes for piece in pieces))
        return matrix

    def experts(
        self, stored: Sequence[StoredTensor], parts: Sequence[Part], turned: bool, /
    ) -> Fp8Experts | None:
        scaled = [each for each in stored if isinstance(each, ScaledTensor)]
        group = self._fp8_group(scaled, parts, -2 if turned else -1)
        if len(scaled) < len(parts) or group is None:
            return None
        experts = _join_experts(*_read_fp8(scaled, parts), group, turned=turned)
        self._count(experts)
        return experts

    def _fp8_group(
        self,
        stored: Sequence[ScaledTensor],
        parts: Sequence[Part],
        inputs: Literal[-1, -2] = -1,
    ) -> int | None:
        """Return the number of inputs per scale if all these slices can be kept in FP8, or else
        `None`.

        inputs: the axis of inputs.
        """
        policy = self.loading.policy
        groups = {
            _group_of(part, each.scheme, inputs)
            if each.scheme.stored == "F8_E4M3" and policy.projection(each.name)
            else None
            for each, part in zip(stored, parts)
        }
        return groups.pop() if policy.fp8 and len(groups) == 1 else None

    def _join_fp8(
        self, stored: Sequence[ScaledTensor], parts: Sequence[Part], group: int
    ) -> Fp8Matrix:
        pieces, scales = _read_fp8(stored, parts)
        values = torch.cat([piece.view(torch.uint8) for piece in pieces]).view(FP8)
        each = [
            scale[:, ::group].expand(len(piece), -1)
            for piece, scale in zip(pieces, scales, strict=True)
        ]
        matrix = prepare(Fp8Matrix(values, torch.cat(each).contiguous(), group), self.loading.dtype)
        self._count(matrix)
        return matrix

    def _count(self, matrix: Fp8Matrix | Fp8Experts) -> None:
        self.loading.policy.tally.count_fp8(matrix, self.loading.dtype.itemsize)
        self.loading.gauge.update(matrix.values.nbytes)


def scales_name(weight: str, scheme: Scheme) -> str:
    """Return the name of the tensor with the scales of `weight`."""
    return weight + scheme.suffix.removeprefix("weight")


def _read_all(
    stored: Sequence[ScaledTensor], parts: Sequence[Part]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    for each, part in zip(stored, parts):
        each.check(part)
    pieces = [each.loading.files.read_slice(part) for each, part in zip(stored, parts)]
    return pieces, [each.scales(part) for each, part in zip(stored, parts)]


def _read_fp8(
    stored: Sequence[ScaledTensor], parts: Sequence[Part]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Read the stored values and scales to the device. Raises CheckpointError for values that are
    not finite.
    """
    pieces, scales = _read_all(stored, parts)
    pieces = [piece.to(stored[0].loading.device) for piece in pieces]
    for each, piece in zip(stored, pieces):
        each.check_finite(piece.float())
    return pieces, scales


def _cut_scales(scales: torch.Tensor, part: Part, scheme: Scheme) -> torch.Tensor:
    """Return the scales of a slice: float32 [..., rows or 1, columns or 1]."""
    index = _whole_index(part)
    cut = scales.float()[index[:-2]]
    for axis, of in zip((-2, -1), scheme.block):
        if of:
            start, stop, _ = index[axis].indices(part.shape[axis])
            cut = cut.index_select(axis, torch.arange(start, stop) // of)
    return cut


def _whole_index(part: Part) -> tuple[slice, ...]:
    return (*part.index, *(slice(None),) * (len(part.shape) - len(part.index)))


def _multiply(piece: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
    """Write piece * scales to target, a few rows at a time.

    piece: on the host. scales: [..., rows or 1, columns or 1], on the target's device.
    """
    if piece.dim() > 2:
        for each in zip(piece, scales, target):
            _multiply(*each)
        return
    count = max(1, BLOCK_VALUES // max(1, piece.shape[1]))
    for first in range(0, piece.shape[0], count):
        rows = slice(first, first + count)
        factor = scales if scales.shape[0] == 1 else scales[rows]
        target[rows].copy_(piece[rows].to(factor.device).float().mul_(factor))


def _group_of(part: Part, scheme: Scheme, axis: Literal[-1, -2]) -> int | None:
    """Return the number of values per scale in the slice, along `axis`.

    Returns `None` if the slice splits a group, or if there is no kernel for this number.
    """
    start, stop, _ = _whole_index(part)[axis].indices(part.shape[axis])
    of = scheme.block[axis]
    if not of or start // of == (stop - 1) // of:
        return stop - start
    return of if start % of == 0 and of % MIN_FP8_GROUP == 0 else None


def _join_experts(
    pieces: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], group: int, *, turned: bool
) -> Fp8Experts:
    """Concatenate tensors of experts along their outputs.

    pieces: the values, each [experts, out, in], or [experts, in, out] if `turned`.
    scales: the scales of each, [..., rows or 1, columns or 1].
    group: the number of inputs per scale.
    """
    last = -1 if turned else -2  # the axis of outputs
    values = torch.cat([piece.view(torch.uint8) for piece in pieces], last)
    shapes = [(*scale.shape[:-2], *piece.shape[-2:]) for piece, scale in zip(pieces, scales)]
    each = [scale.expand(shape) for scale, shape in zip(scales, shapes)]
    found = torch.cat(each, last)
    if turned:
        values, found = values.transpose(-2, -1), found.transpose(-2, -1)
    return Fp8Experts(values.contiguous().view(FP8), found[..., ::group].contiguous(), group)
