"""Reads the tensors in a checkpoint's files, in safetensors or in a plugin's format, by the names
that layers use.

It can describe tensors, read slices of them, and list tensors that no layer uses. It also reports
the progress of loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import read_json, weights_elsewhere
from saccade.families.registry import find_format
from saccade.nn.weights import Part


class TensorFiles:
    """Finds and reads tensors in the files of a directory, or in one file, by canonical names.

    `total` is the size of the files in bytes. A file is opened once to describe its tensors, and
    again for each tensor that is read, because bytes that were read count as memory of this process
    as long as their mapping exists.
    """

    def __init__(self, folder: Path, canonical_name: Callable[[str], str]) -> None:
        """Open all files and list their tensors.

        Raises CheckpointError if a file is missing or cannot be opened.

        canonical_name: converts the name of a tensor in the file to the name that layers use.
        """
        files = weight_files(folder)
        self.folder = folder
        self.total = sum(path.stat().st_size for path in files)
        self._files = {path: open_tensors(path) for path in files}
        self._places = {
            canonical_name(name): (path, name)
            for path, file in self._files.items()
            for name in list(file.keys())
        }
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def by_file(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield the canonical name, dtype (safetensors' name) and shape of each tensor, file by
        file.
        """
        names: dict[Path, list[tuple[str, str]]] = {}
        for canonical, (path, name) in self._places.items():
            names.setdefault(path, []).append((canonical, name))
        for path, tensors in names.items():
            file = self._files[path]
            for canonical, name in tensors:
                stored = file.get_slice(name)
                yield canonical, stored.get_dtype(), tuple(stored.get_shape())

    def locate(self, name: str) -> tuple[Path, str]:
        """Return the file of a tensor, and its name in that file. The tensor must exist."""
        return self._places[name]

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype (safetensors' name) and shape of a tensor. Raises CheckpointError."""
        path, stored_name = self._places[name]
        try:
            stored = self._files[path].get_slice(stored_name)
            return stored.get_dtype(), tuple(stored.get_shape())
        except SafetensorError as error:
            raise self.wrong(name, f"cannot be read: {error}") from error

    def wrong(self, name: str, why: str) -> CheckpointError:
        """Return an error about an existing tensor, with its file and its name in the file."""
        path, stored_name = self._places[name]
        return CheckpointError(f"{path}: tensor {stored_name} {why}")

    def misshapen(
        self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
    ) -> CheckpointError:
        return self.wrong(name, f"is {list(found)}, but by config.json it must be {list(wanted)}")

    def mark_asked(self, names: Collection[str]) -> None:
        """Record that a layer uses these tensors."""
        self._asked.update(names)

    def read_slice(self, part: Part) -> torch.Tensor:
        """Read a slice in the dtype of the file, and return it. Raises CheckpointError.

        If the slice is the full tensor, the result is a view of the mapped file.
        """
        path, name = self._places[part.name]
        try:
            file = open_tensors(path)
            if not part.shape or not part.index:
                whole: torch.Tensor = file.get_tensor(name)
                return whole
            piece: torch.Tensor = file.get_slice(name)[part.index]
        except SafetensorError as error:
            raise self.wrong(part.name, f"cannot be read: {error}") from error
        return piece

    def unasked(self) -> set[str]:
        """Return the canonical names of tensors that no layer uses."""
        return self._places.keys() - self._asked


class TensorSlice(Protocol):
    """One tensor in a file. Indexing it reads the slice. `get_dtype` returns safetensors' name of
    the dtype.
    """

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class TensorFile(Protocol):
    """An open file of tensors, with the methods of safetensors' `safe_open`."""

    def keys(self) -> Sequence[str]: ...
    def get_slice(self, name: str) -> TensorSlice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint.

    These are the files in its index if it has one, otherwise all in the directory. If `folder` is a
    file, return that file. Raises CheckpointError if there is no file or one is missing.
    """
    if folder.is_file():
        return [folder]
    if elsewhere := weights_elsewhere(folder):
        return elsewhere
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).section("weight_map").data.values()))
        files = [folder / str(name) for name in names]
        if missing := [path.name for path in files if not path.is_file()]:
            raise CheckpointError(
                f"{index} lists missing files: {', '.join(missing)}: the download is incomplete"
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if strange := [path for path in files if not path.is_file()]:
        raise CheckpointError(f"{strange[0]} is not a file")  # opening a pipe would block
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors file: complete the download, or use random weights "
            "with --tune load_format=dummy"
        )
    return files


def open_tensors(path: Path) -> TensorFile:
    """Open a file of tensors. Raises CheckpointError if it is unreadable."""
    if (found := find_format(path)) is not None:
        opened: TensorFile = resolve_name(found.tensors)(path)
        return opened
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from error


REPORT_SECONDS = 0.2

ReportProgress = Callable[[int, int], None]
"""A callback with the arguments (bytes read so far, total bytes)."""


def ignore_progress(_done: int, _total: int) -> None:
    """A `ReportProgress` that does nothing."""


class ProgressReporter:
    """Counts the bytes read from a checkpoint, and reports them every `REPORT_SECONDS`."""

    def __init__(self, on_progress: ReportProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0
        self._at = time.monotonic()
        on_progress(0, total)

    def update(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes read, and report progress if it is due."""
        self._done += nbytes
        if (now := time.monotonic()) - self._at >= REPORT_SECONDS:
            self._at = now
            self._on_progress(min(self._done, self._total), self._total)

    def close(self) -> None:
        """Report all bytes as read. The bytes not read so far are of tensors that no layer uses."""
        self._on_progress(self._total, self._total)
