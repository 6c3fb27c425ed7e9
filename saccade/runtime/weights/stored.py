"""A checkpoint's tensor in one of the stored forms, and its way to layers: `checkpoint_weights.py`
asks a `StoredTensor`, in any form.

Owns the form with plain numbers. Plugins have others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.kernels.matrix import Fp8Experts, Matrix
from saccade.kernels.reference.ops import Ops
from saccade.nn.weights import Part
from saccade.plugins import builders
from saccade.runtime.weights.quant_policy import Kind, QuantPolicy
from saccade.runtime.weights.tensors import ProgressReporter, TensorFiles

FORMATS = frozenset({"F32", "F16", "BF16"})
"""Supported safetensors dtypes."""
CHUNK_ROWS = 4096
"""Rows of a matrix that are compared at a time, so that no second copy of it is in memory."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Source and target of loading a checkpoint.

    Has the network's dtype, device and operations, and the choice of matrices with few bits.
    """

    files: TensorFiles
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    policy: QuantPolicy
    gauge: ProgressReporter


class StoredTensor(ABC):
    """A tensor by its canonical name, in one form.

    All methods raise CheckpointError, naming file and tensor, for a tensor that is missing,
    misshapen, damaged or not finite.
    """

    __slots__ = ("loading", "name")

    def __init__(self, loading: LoadContext, name: str) -> None:
        self.loading = loading
        self.name = name

    @abstractmethod
    def check(self, part: Part) -> None:
        """Raise unless all parts are present, in readable formats, and have the shapes from
        config.json.

        From then on the tensor counts as asked for.
        """

    @abstractmethod
    def restore(self, part: Part, target: torch.Tensor) -> None:
        """Write the wanted slice into `target`, in its dtype. Call after `check`."""

    def equals(self, _part: Part, _values: torch.Tensor) -> bool:
        """Return True if the wanted rows have these values, in the values' dtype.

        A quantised tensor is its own, whatever it would be restored to.
        """
        return False

    def product(self, _stored: Sequence[StoredTensor], _parts: Sequence[Part]) -> Matrix | None:
        """Stack the given tensors, this one first, as one matrix in their stored few bits.

        Returns `None` if they are to be whole.
        """
        return None

    def product_kind(self, _stored: Sequence[StoredTensor], _parts: Sequence[Part]) -> Kind | None:
        """Return the few bits in which `product` keeps the parts, as files' headers tell.

        Returns `None` if they are to be whole.
        """
        return None

    def experts(
        self, _stored: Sequence[StoredTensor], _parts: Sequence[Part], _turned: bool, /
    ) -> Fp8Experts | None:
        """Stack experts' tensors as `product` does. turned: [experts, in, out]
        (`Weights.load_experts`).
        """
        return None

    def check_finite(self, target: torch.Tensor) -> None:
        """Raise for weights that would make every answer meaningless.

        The minimum and maximum suffice: a NaN anywhere makes both NaN. Both cost as much as the
        copy from memory (0.5 s for 2 billion bfloat16 on two cores), `isfinite` twenty times that.
        """
        least, greatest = torch.stack(torch.aminmax(target)).tolist() if target.numel() else (0, 0)
        if not (math.isfinite(least) and math.isfinite(greatest)):
            dtype = str(self.loading.dtype).removeprefix("torch.")
            raise self.loading.files.wrong(
                self.name,
                f"has values that are not finite in {dtype} (from {least:g} to {greatest:g}): the "
                "checkpoint is damaged, or needs another --dtype",
            )


class StoredForms(Protocol):
    """The tensors of a checkpoint that config.json makes others than plain numbers."""

    def __contains__(self, name: object, /) -> bool:
        """Return True for a tensor that is stored as several tensors with other names."""
        ...

    def find(self, name: str) -> StoredTensor | None:
        """Return a tensor's form, or None for plain numbers. Raises CheckpointError."""
        ...

    def reads(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True for a tensor that is read in its format. Raises CheckpointError."""
        ...

    def ignores(self, name: str) -> bool:
        """Return True for a tensor that no layer needs."""
        ...


def find_forms(config: Section, loading: LoadContext) -> StoredForms | None:
    """Return how tensors are stored, or None where all are plain numbers. Raises CheckpointError.

    config: config.json.
    """
    for read in builders(lambda plugin: plugin.stored_forms, config):
        forms: StoredForms | None = read(config, loading)
        return forms
    return None


class PlainTensor(StoredTensor):
    """Numbers in 16 or 32 bits."""

    def check(self, part: Part) -> None:
        check_shape(self.loading.files, part, FORMATS)

    def equals(self, part: Part, values: torch.Tensor) -> bool:
        self.check(part)
        read, chunks = self.loading.files.read_slice, values.split(CHUNK_ROWS)
        return all(
            torch.equal(read(chunk).to(known), known)
            for chunk, known in zip(row_chunks(part), chunks)
        )

    def restore(self, part: Part, target: torch.Tensor) -> None:
        piece = self.loading.files.read_slice(part)
        target.copy_(piece)
        if not part.limit:
            self.check_finite(target)
        self.loading.gauge.update(piece.nbytes)


def row_chunks(part: Part) -> Iterator[Part]:
    """Yield a matrix's wanted rows, `CHUNK_ROWS` at a time."""
    first, end, _ = part.index[0].indices(part.shape[0]) if part.index else (0, part.shape[0], 1)
    for start in range(first, end, CHUNK_ROWS):
        yield Part(part.name, part.shape, (slice(start, min(start + CHUNK_ROWS, end)),))


def check_shape(files: TensorFiles, part: Part, formats: frozenset[str]) -> None:
    """Raise CheckpointError unless the tensor is present, in a given format and its shape."""
    files.mark_asked([part.name])
    if part.name not in files:
        raise CheckpointError(
            f"{files.folder}: no file has the tensor {part.name}, which config.json asks for"
        )
    kind, shape = files.describe(part.name)
    if kind not in formats:
        raise unreadable(files, part.name, kind)
    if shape != part.shape:
        raise files.misshapen(part.name, shape, part.shape)


def unreadable(files: TensorFiles, name: str, kind: str) -> CheckpointError:
    return files.wrong(
        name,
        f"is stored as {kind}; only F32, F16 and BF16 weights can be read, "
        "and quantised ones whose scales are in config.json's quantization_config: use the "
        "model's unquantised checkpoint",
    )


@contextmanager
def in_memory(parts: Sequence[Part]) -> Iterator[None]:
    """Raise CheckpointError if there is too little memory for the parts."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for it on a CPU
        shown = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise CheckpointError(
            f"not enough memory for the sizes in config.json: {shown}: {str(error)[:200]}"
        ) from error
