"""Loads quantized matrices from a GGUF file. They stay quantized if there are kernels for their
format, and are dequantized otherwise.

Q4_0, which has a scale for each 32 numbers of 4 bits, is used unchanged. Q4_1 also has a minimum,
which the CPU's kernels support. All other formats are converted to 8 bits with a scale per output,
and the loss of precision is measured for each matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from saccade.kernels.matrix import Int8Matrix, Matrix
from saccade.kernels.reference.int4 import steps_from
from saccade.kernels.reference.int8 import restore_matrix
from saccade.nn.weights import Part
from saccade.plugins.gguf.tensors import PLAIN, GgufSlice, open_gguf, read_rows
from saccade.plugins.quantized.unpack import Numbers, join_int4
from saccade.runtime.weights.quant_policy import Kind
from saccade.runtime.weights.stored import FORMATS, LoadContext, StoredTensor, check_shape

GROUP, SCALE_BYTES = 32, 2
"""Number of values in a block of Q4_0, and the bytes of the scale before them. Q4_1's minimum takes
as many bytes.
"""

logger = logging.getLogger(__name__)


class BlockTensor(StoredTensor):
    """A quantized tensor in a GGUF file.

    blocks: its data in the file.
    """

    __slots__ = ("blocks",)

    def __init__(self, loading: LoadContext, name: str, blocks: GgufSlice) -> None:
        super().__init__(loading, name)
        self.blocks = blocks

    def check(self, part: Part) -> None:
        check_shape(self.loading.files, part, FORMATS)

    def restore(self, part: Part, target: torch.Tensor) -> None:
        target.copy_(self.loading.files.read_slice(part))
        self.check_finite(target)
        stored = self._stored(part)
        self.loading.policy.tally.count_restored(stored, target)
        self.loading.gauge.update(stored)

    def product_kind(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Kind | None:
        policy = self.loading.policy
        blocks = [each for each in stored if isinstance(each, BlockTensor)]
        if len(blocks) < len(parts) or not all(policy.projection(each.name) for each in blocks):
            return None
        if all(each._has_four_bits and policy.int4(each.name) for each in blocks):
            return "int4"
        return "int8" if self._may_be_int8 else None

    def product(self, stored: Sequence[StoredTensor], parts: Sequence[Part]) -> Matrix | None:
        policy, kind = self.loading.policy, self.product_kind(stored, parts)
        if kind is None:
            return None
        blocks = [each for each in stored if isinstance(each, BlockTensor)]
        for each, part in zip(blocks, parts):
            each.check(part)
        if kind == "int4":
            numbers = [each._numbers(part) for each, part in zip(blocks, parts)]
            few, why = join_int4(numbers)
            if few is not None:
                policy.tally.count_int4(few, self.loading.dtype.itemsize)
                self.loading.gauge.update(sum(each.stored for each in numbers))
                return few
            policy.tally.reasons.add(why)
            if not self._may_be_int8:
                return None
        rows = [each._rows(part) for each, part in zip(blocks, parts)]
        matrix = Int8Matrix(
            torch.cat([each.values for each in rows]),
            torch.cat([each.scales for each in rows]),
            transformed=True,
        )
        policy.tally.count_int8(matrix, self.loading.dtype.itemsize, made=True)
        return matrix

    @property
    def _may_be_int8(self) -> bool:
        """Whether the tensor may be converted to 8 bits. An explicit float32 keeps full
        precision.
        """
        policy = self.loading.policy
        return not policy.made and policy.native and self.loading.dtype != torch.float32

    @property
    def _has_four_bits(self) -> bool:
        made = self.blocks.made
        by_rows = made.heads is None or made.heads.axis == 0
        plain = len(made.sources) == 1 and by_rows and made.edit == "none"
        cpu = self.loading.device.type == "cpu"
        return plain and self.blocks.kinds in ({"Q4_0"}, *([{"Q4_1"}] if cpu else []))

    def _stored(self, part: Part) -> int:
        wanted, whole = torch.Size(part.wanted).numel(), torch.Size(part.shape).numel()
        return self.blocks.made.nbytes * wanted // max(1, whole)

    def _rows(self, part: Part) -> Int8Matrix:
        """Dequantize a slice, quantize it to 8 bits, and record the loss."""
        batch_invariant = self.loading.files.read_slice(part).float()
        self.check_finite(batch_invariant)
        made = self.loading.ops.quantise_int8(batch_invariant)
        rounded = restore_matrix(made, batch_invariant.shape[1])
        loss = float(rounded.sub_(batch_invariant).norm() / batch_invariant.norm().clamp_min(1e-30))
        kinds = "+".join(sorted(self.blocks.kinds))
        logger.debug("%s: %s in int8, %.3f %% off (rms)", self.name, kinds, 100 * loss)
        self.loading.policy.tally.losses[self.name] = loss
        self.loading.gauge.update(self._stored(part))
        return made

    def _numbers(self, part: Part) -> Numbers:
        """Read a slice of a matrix in Q4_0 or Q4_1."""
        rows, columns = (*part.index, *(slice(None),) * (2 - len(part.index)))
        start, stop, _ = rows.indices(part.shape[0])
        raw = read_rows(self.blocks.path, self.blocks.made, start, stop)
        each = raw.view(stop - start, part.shape[1] // GROUP, -1)
        scales = each[..., :SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)
        self.check_finite(scales)
        pairs, zeros = each[..., SCALE_BYTES:], None
        if self.blocks.kinds == {"Q4_1"}:
            least = pairs[..., :SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)
            self.check_finite(least)
            steps = scales.float()
            scales, zeros = steps_from(least.float(), steps)
            pairs = pairs[..., SCALE_BYTES:] * (scales == steps).unsqueeze(-1)  # 0 if constant
        numbers = torch.cat([pairs & 15, pairs >> 4], dim=-1).view(stop - start, -1)
        device = self.loading.device
        return Numbers(
            numbers[:, columns].contiguous().to(device),
            scales.to(device),
            None if zeros is None else zeros.to(device),
            (torch.arange(part.shape[1]) // GROUP)[columns].to(device),
            GROUP,
            4,
            self._stored(part),
        )


def block_tensor(loading: LoadContext, name: str) -> BlockTensor | None:
    """Return the tensor if it is quantized in the file, or else `None`."""
    path, stored_name = loading.files.locate(name)
    found = open_gguf(path).get_slice(stored_name)
    return BlockTensor(loading, name, found) if found.kinds - PLAIN.keys() else None
