"""Builds a network from the headers of a checkpoint's files, with tensors that have a shape and
dtype, but no memory.

The bytes of these tensors are counted in the layout of the device's kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import torch

from saccade.core.config import Dtype, QuantizationMode, TowerQuantization
from saccade.core.family import FamilySpec
from saccade.families.checkpoint import read_json
from saccade.families.registry import family_model
from saccade.kernels.matrix import (
    CHUNK,
    EACH,
    FP8,
    DenseMatrix,
    Fp8Experts,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Matrix,
)
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference.hadamard import MIN_BLOCK
from saccade.kernels.reference.ops import Ops
from saccade.nn.weights import Part
from saccade.parallel import UNSHARDED
from saccade.runtime.memory import DTYPES
from saccade.runtime.weights.checkpoint_weights import (
    CheckpointWeights,
    check_language,
    choose_policy,
)
from saccade.runtime.weights.quant_policy import INT4_GROUP, Kind, LoadTally
from saccade.runtime.weights.stored import StoredTensor

META = torch.device("meta")
"""PyTorch's device for tensors without memory."""


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """How a model is loaded: the values of --dtype and of both --quantization options."""

    dtype: Dtype
    quantization: QuantizationMode = "auto"
    tower: TowerQuantization = "none"


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a network after it is loaded, for the language model and the vision encoder."""

    language: int
    tower: int
    quantised: str  # a description of the quantized matrices


class LayoutOps(Ops):
    """Lays out matrices as on a CPU, where packing copies each matrix."""

    def quantise_int8(self, weight: torch.Tensor) -> Int8Matrix:
        outputs, inputs = weight.shape
        return _int8(outputs, -(-inputs // MIN_BLOCK) * MIN_BLOCK)

    def quantise_int4(self, weight: torch.Tensor, group: int) -> Int4Matrix:
        outputs, inputs = weight.shape
        return _int4(outputs, inputs, group)

    def prepack_dense(self, matrix: DenseMatrix) -> Matrix:
        return DenseMatrix(matrix.values.clone())

    def prepack_int8(self, matrix: Int8Matrix) -> Matrix:
        return matrix

    def prepack_int4(self, matrix: Int4Matrix) -> Matrix:
        return matrix


class GpuLayoutOps(LayoutOps):
    """Lays out matrices as on a GPU, where they stay as they are. No GPU is needed."""

    stacks = True

    @property
    def takes_int4(self) -> bool:
        return True

    def prepack_dense(self, matrix: DenseMatrix) -> Matrix:
        return matrix


class DescribedWeights(CheckpointWeights):
    """The tensors of a checkpoint, of which only the headers are read."""

    def lay_out(self, ops: Ops) -> None:
        """From now on, build layers with `ops` from tensors without memory."""
        self.device, self.ops = META, ops

    def load_matrix(self, *parts: Part) -> Matrix:
        stored = [self._stored(part.name) for part in parts]
        kind = stored[0].product_kind(stored, parts)
        if kind is None:
            return self._policy.make(self._restore(parts, stored), parts, self.ops)
        self._ask(parts, stored)
        matrix = few_bits(kind, sum(part.wanted[0] for part in parts), parts[0].wanted[1])
        tally, item = self._policy.tally, self.dtype.itemsize
        if isinstance(matrix, Int8Matrix):
            made = self._files.describe(parts[0].name)[0] != "I8"
            tally.count_int8(matrix, item, made=made)
        elif isinstance(matrix, Fp8Matrix):
            tally.count_fp8(matrix, item)
        else:
            tally.count_int4(matrix, item)
        return matrix

    def load_experts(self, parts: Sequence[Part], turned: bool) -> Fp8Experts | None:
        stored = [self._stored(part.name) for part in parts]
        if stored[0].product_kind(stored, parts) != "fp8":
            return None
        self._ask(parts, stored)
        experts, rows, columns = parts[0].wanted
        outputs, inputs = (columns, rows) if turned else (rows, columns)
        outputs *= len(parts)
        values = torch.empty(experts, outputs, inputs, dtype=FP8, device=META)
        return Fp8Experts(values, torch.empty(experts, outputs, 1, device=META), inputs)

    def equals(self, part: Part, _values: torch.Tensor) -> bool:
        """Return True, assuming that tensors of equal shape have equal values."""
        return self.fits(part)

    def _restore(self, parts: Sequence[Part], stored: Sequence[StoredTensor]) -> torch.Tensor:
        self._ask(parts, stored)
        rows = sum(part.wanted[0] if part.wanted else 1 for part in parts)
        # The host reads the value of a limit, so it needs memory.
        place = torch.device("cpu") if parts[0].limit else META
        return torch.zeros((rows, *parts[0].wanted[1:]), dtype=self.dtype, device=place)

    def _ask(self, parts: Sequence[Part], stored: Sequence[StoredTensor]) -> None:
        for each, part in zip(stored, parts):
            each.check(part)


def few_bits(kind: Kind, outputs: int, inputs: int) -> Int8Matrix | Fp8Matrix | Int4Matrix:
    """Return a quantized matrix without memory. With 4 bits, `INT4_GROUP` inputs share a scale."""
    if kind == "int8":
        return _int8(outputs, inputs)
    if kind == "fp8":
        values = torch.empty(outputs, inputs, dtype=FP8, device=META)
        return Fp8Matrix(values, torch.empty(outputs, 1, device=META), inputs)
    return _int4(outputs, inputs, INT4_GROUP)


def count_weights(
    spec: FamilySpec, folder: Path, device: torch.device, formats: NumberFormats
) -> WeightBytes:
    """Return the bytes that the network in `folder` takes once it is loaded on the device.

    Raises ConfigError for a quantization that the device does not support, and CheckpointError with
    the file and the tensor for a checkpoint that would not load.
    """
    model, dtype = family_model(spec), DTYPES[formats.dtype]
    layout = LayoutOps() if device.type == "cpu" else GpuLayoutOps()
    ops, tally = pick_ops(device, dtype) if device.type == "cpu" else layout, LoadTally()
    policy = choose_policy(
        model.projection, formats.quantization, formats.tower, dtype, device, ops, tally
    )
    config = read_json(folder / "config.json")
    weights = DescribedWeights(
        folder, model.canonical_name, dtype, device, config=config, policy=policy, ops=ops
    )
    weights.check_formats(lambda name: model.harmless(name))
    weights.lay_out(layout)
    net = check_language(policy, model.build(weights, UNSHARDED, UNSHARDED))
    tower = storage_bytes(net.vision) if spec.sees_images else 0
    return WeightBytes(storage_bytes(net) - tower, tower, tally.line(dtype))


def storage_bytes(thing: object) -> int:
    """Return the total size, in bytes, of all tensors that are reachable from `thing`. Memory that
    they share is counted once.
    """
    seen, left, found = set[int](), [thing], dict[int, int]()
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.is_mkldnn:  # packed by a library, which owns the memory
                found[id(each)] = each.nbytes
            else:
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        else:
            left += gc.get_referents(each)
    return sum(found.values())


def _int8(outputs: int, inputs: int) -> Int8Matrix:
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=META)
    return Int8Matrix(values, torch.empty(outputs, device=META))


def _int4(outputs: int, inputs: int, group: int) -> Int4Matrix:
    words = torch.empty(
        outputs, -(-inputs // CHUNK) * CHUNK // EACH, dtype=torch.int32, device=META
    )
    # The layout of CPUs. On a GPU, zeros have 8 bits.
    scales = torch.empty(-(-inputs // group), outputs, dtype=torch.float16, device=META)
    return Int4Matrix(words, scales, torch.empty_like(scales), group, inputs)
