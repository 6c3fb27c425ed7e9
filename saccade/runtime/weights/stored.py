"""Loads the tensors of a checkpoint in the formats in which they are stored.

`checkpoint_weights.py` loads each tensor through the interface `StoredTensor`. This module
implements unquantized tensors (`PlainTensor`), and plugins implement quantized ones.
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
from saccade.plugins import builder
from saccade.runtime.weights.quant_policy import Kind, QuantPolicy
from saccade.runtime.weights.tensors import ProgressReporter, TensorFiles

FORMATS = frozenset({"F32", "F16", "BF16"})
"""Supported safetensors dtypes."""
CHUNK_ROWS = 4096
"""The number of rows of a matrix that are compared at a time, to avoid a second copy in memory."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """A checkpoint that is being loaded, and the dtype, device, operations and quantization of its
    network.
    """

    files: TensorFiles
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    policy: QuantPolicy
    gauge: ProgressReporter


class StoredTensor(ABC):
    """A tensor of a checkpoint, with its canonical name and its stored format.

    All methods raise CheckpointError, with the file and the tensor's name, if the tensor is
    missing, has another shape, or has values that are damaged or not finite.
    """

    __slots__ = ("loading", "name")

    def __init__(self, loading: LoadContext, name: str) -> None:
        self.loading = loading
        self.name = name

    @abstractmethod
    def check(self, part: Part) -> None:
        """Raise CheckpointError unless the tensor exists, in a supported format and the right
        shape.

        config.json determines the shape. This also marks the tensor as used.
        """

    @abstractmethod
    def restore(self, part: Part, target: torch.Tensor) -> None:
        """Load the slice `part` into `target`, converted to its dtype. Call `check` before."""

    def equals(self, _part: Part, _values: torch.Tensor) -> bool:
        """Return True if the rows that `_part` selects equal `_values`, converted to their dtype.

        It is always False for a quantized tensor, because its values depend on dequantization.
        """
        return False

    def product(self, _stored: Sequence[StoredTensor], _parts: Sequence[Part]) -> Matrix | None:
        """Concatenate the given tensors to one matrix in their stored quantized format.

        This tensor is the first of them. Returns None if they must be dequantized.
        """
        return None

    def product_kind(self, _stored: Sequence[StoredTensor], _parts: Sequence[Part]) -> Kind | None:
        """Return the format of the matrix that `product` would return, or None for dequantization.

        This only reads the headers of files.
        """
        return None

    def experts(
        self, _stored: Sequence[StoredTensor], _parts: Sequence[Part], _turned: bool, /
    ) -> Fp8Experts | None:
        """Concatenate the tensors of experts without dequantizing them.

        Returns None if they must be dequantized.

        _turned: True if they are [experts, in, out] (see `Weights.load_experts`).
        """
        return None

    def check_finite(self, target: torch.Tensor) -> None:
        """Raise CheckpointError if `target` has NaN or infinite values.

        It suffices to check the minimum and the maximum, since a single NaN makes both NaN. They
        take as long as a copy in memory (0.5 s for 2 billion bfloat16 values on two cores), and
        `isfinite` takes twenty times longer.
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
    """Finds the tensors of a checkpoint that are quantized according to config.json."""

    def __contains__(self, name: object, /) -> bool:
        """Return True if the tensor `name` is stored as more than one tensor, with other names."""
        ...

    def find(self, name: str) -> StoredTensor | None:
        """Return the quantized tensor `name`, or None if it is not quantized. Raises
        CheckpointError.
        """
        ...

    def reads(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if the tensor `name` of a file has a supported quantized format.

        Raises CheckpointError.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Return True if no layer needs the tensor that a file calls `name`."""
        ...


def find_forms(config: Section, loading: LoadContext) -> StoredForms | None:
    """Return the quantized tensors of a checkpoint, or None if it is not quantized.

    Raises CheckpointError.

    config: the content of config.json.
    """
    if read := builder(lambda plugin: plugin.checkpoints.stored_forms, config):
        forms: StoredForms | None = read(config, loading)
        return forms
    return None


class PlainTensor(StoredTensor):
    """An unquantized tensor, in float32, float16 or bfloat16."""

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
    """Split the rows that `part` selects into parts of at most `CHUNK_ROWS` rows."""
    first, end, _ = part.index[0].indices(part.shape[0]) if part.index else (0, part.shape[0], 1)
    for start in range(first, end, CHUNK_ROWS):
        yield Part(part.name, part.shape, (slice(start, min(start + CHUNK_ROWS, end)),))


def check_shape(files: TensorFiles, part: Part, formats: frozenset[str]) -> None:
    """Raise CheckpointError unless the tensor exists and has one of the formats and the shape of
    `part`.

    This also marks the tensor as used.

    formats: names of dtypes in safetensors.
    """
    files.mark_asked([part.name])
    if part.name not in files:
        raise CheckpointError(
            f"{files.folder}: no file has the tensor {part.name}, which config.json requires"
        )
    kind, shape = files.describe(part.name)
    if kind not in formats:
        raise unreadable(files, part.name, kind)
    if shape != part.shape:
        raise files.misshapen(part.name, shape, part.shape)


def unreadable(files: TensorFiles, name: str, kind: str) -> CheckpointError:
    return files.wrong(
        name,
        f"is stored as {kind}; only F32, F16 and BF16 weights are supported, and quantized ones "
        "that config.json's quantization_config describes: use the model's unquantized checkpoint",
    )


@contextmanager
def in_memory(parts: Sequence[Part]) -> Iterator[None]:
    """Convert an out-of-memory error in the context to a CheckpointError that lists the parts."""
    try:
        yield
    except RuntimeError as error:  # on a CPU, torch has no specific class for it
        shown = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise CheckpointError(
            f"not enough memory for the sizes in config.json: {shown}: {str(error)[:200]}"
        ) from error
