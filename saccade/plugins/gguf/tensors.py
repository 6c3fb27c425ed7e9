"""Reads the tensors of a GGUF file by transformers' names and shapes, with the interface of
safetensors.

The package `gguf` dequantizes to float32, without a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.core.errors import CheckpointError
from saccade.plugins.gguf.header import TensorInfo, known_formats, read_header
from saccade.plugins.gguf.known import made_tensors
from saccade.plugins.gguf.made import Heads, Made

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The torch dtypes of formats that are not quantized."""
BLOCK_VALUES = 1 << 20
"""Number of values that a thread dequantizes at a time."""


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """One tensor of an open file, which is read when it is indexed."""

    path: Path
    made: Made

    def get_shape(self) -> Sequence[int]:
        return self.made.shape

    @property
    def kinds(self) -> set[str]:
        """The formats in the file of the tensor's sources."""
        return {source.kind for source in self.made.sources}

    def get_dtype(self) -> str:
        kinds = self.kinds
        if len(kinds) == 1 and not self.made.heads and self.made.edit == "none":
            (kind,) = kinds
            return kind if kind in PLAIN or not _readable(kind) else "F32"
        return next((kind for kind in kinds if not _readable(kind)), "F32")

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        made = self.made
        if len(made.sources) > 1 or made.heads:
            return _whole(self.path, made)[index]
        (source,) = made.sources
        rows, rest = index[0], index[1:]
        start, stop, step = rows.indices(made.shape[0])
        assert step == 1
        piece = read_values(self.path, source, start, stop)
        piece = _edited(piece.view(stop - start, *made.shape[1:]), made)
        return piece[(slice(None), *rest)]


class GgufTensors:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the file's header. Raises CheckpointError."""
        self._path = path
        self._made = made_tensors(read_header(path))

    def keys(self) -> Sequence[str]:
        return list(self._made)

    def get_slice(self, name: str) -> GgufSlice:
        return GgufSlice(self._path, self._made[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return _whole(self._path, self._made[name])


def open_gguf(path: Path) -> GgufTensors:
    """Open a GGUF file. Raises CheckpointError.

    The header is cached until the file changes.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return _open(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _open(path: Path, _changed: int, _size: int) -> GgufTensors:
    return GgufTensors(path)


@lru_cache
def _readable(kind: str) -> bool:
    """Return True if the installed package can dequantize the format."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    size = next(size for name, _, size in known_formats().values() if name == kind)
    try:
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def _whole(path: Path, made: Made) -> torch.Tensor:
    pieces = [read_values(path, source, 0, source.shape[0]) for source in made.sources]
    if len(pieces) > 1 and len({piece.dtype for piece in pieces}) > 1:
        pieces = [piece.float() for piece in pieces]
    if made.join is None:
        whole = torch.stack(pieces, dim=2)
    else:
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=made.join)
    return _edited(whole.view(made.shape), made)


def _edited(values: torch.Tensor, made: Made) -> torch.Tensor:
    if made.edit == "less one":
        values = values.float() - 1.0
    elif made.edit == "decay":
        values = torch.log(-values.float())
    elif made.edit == "colours last":
        planes = values.float().view(len(values), 3, -1)
        values = planes.transpose(1, 2).reshape(len(values), -1)
    return _together(values, made.heads).float() if made.heads else values


def _together(values: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Reorder heads, so that the heads that share a KV head are contiguous."""
    axis, turned = heads.axis, heads.keys * heads.each * heads.size
    size = turned + heads.rest
    kept = values.narrow(axis, 0, heads.start)
    runs = values.narrow(axis, heads.start, heads.runs * size).unflatten(axis, (heads.runs, size))
    apart, rest = runs.split((turned, heads.rest), dim=axis + 1)
    parts = apart.unflatten(axis + 1, (heads.each, heads.keys, heads.size))
    order = parts.transpose(axis + 1, axis + 2).flatten(axis + 1, axis + 3)
    together = torch.cat([order, rest], dim=axis + 1).flatten(axis, axis + 1)
    return torch.cat([kept, together], dim=axis)


def read_rows(path: Path, made: Made, start: int, stop: int) -> torch.Tensor:
    """Read the quantized bytes of rows [start, stop) of a tensor with one source: uint8 [rows,
    bytes].

    Raises CheckpointError if the file has changed.
    """
    (source,) = made.sources
    if made.heads is None:
        return read_blocks(path, source, start, stop).view(stop - start, -1)
    assert made.heads.axis == 0
    whole = read_blocks(path, source, 0, made.shape[0]).view(made.shape[0], -1)
    return _together(whole, made.heads)[start:stop]


def read_values(path: Path, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Read rows [start, stop) along the first axis.

    The result is a view of the memory-mapped file, or float32 if the format is quantized. Raises
    CheckpointError if the file has changed.
    """
    raw = read_blocks(path, tensor, start, stop)
    shape = (stop - start, *tensor.shape[1:])
    if tensor.kind in PLAIN:
        return raw.view(PLAIN[tensor.kind]).view(shape)
    whole = torch.empty(shape, dtype=torch.float32)
    rows = whole.view(-1, tensor.shape[-1])
    _dequantise(raw.view(len(rows), -1).numpy(), tensor.kind, rows)
    return whole


def read_blocks(path: Path, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Return the quantized bytes of rows [start, stop), uint8 [N], as a view of the memory-mapped
    file.

    Raises CheckpointError if the file has changed.
    """
    row = tensor.nbytes // tensor.shape[0]
    try:
        raw = np.memmap(path, np.uint8, "c", tensor.start + start * row, ((stop - start) * row,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {tensor.name} cannot be read: {error}") from error
    return torch.from_numpy(raw)


def _dequantise(raw: np.ndarray[Any, Any], kind: str, target: torch.Tensor) -> None:
    """Dequantize `raw` [rows, bytes] to `target` [rows, columns], in several threads."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    count = max(1, BLOCK_VALUES // target.shape[1])
    out = target.numpy()  # NumPy: other threads are not in inference mode

    def fill(first: int) -> None:
        out[first : first + count] = dequantize(
            raw[first : first + count], GGMLQuantizationType[kind]
        )

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(0, len(target), count)))
