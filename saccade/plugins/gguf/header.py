"""Reads the header of a GGUF file: its metadata, and the offsets of its tensors.

All counts and lengths are checked against the file's size before memory is allocated. The package
`gguf` provides the list of formats and their sizes. Its own reader is not used: it creates several
arrays per string (a vocabulary has 300,000 strings), and does not check counts. `layers.py`
interprets the tensors' names.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import CheckpointError, ConfigError
from saccade.core.extras import how_to_install

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Matches the name of one file of a split model. Only its first file has metadata."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 65_536
"""Maximum tensors in a file. Qwen3-VL-235B has 1,131."""
MAX_FIELDS = 4_096
MAX_ITEMS = 1 << 22
"""Maximum items of all arrays. A vocabulary has 250,000 tokens, and as many types, scores and
merges.
"""
MAX_TEXT = 1 << 22
"""Maximum bytes of a string. A chat template has about 10,000."""
MAX_TEXTS = 1 << 26
"""Maximum bytes of all strings. A vocabulary and its merges have about 7 million."""
MAX_VALUES = 1 << 40
"""Maximum values of a tensor."""
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The `struct` formats of metadata types, by the number of the type."""
FLOAT, TEXT, ARRAY = 6, 8, 9
ENDED = "the file is truncated: download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, shape, format and position of one tensor in a file."""

    name: str
    shape: tuple[int, ...]  # in values, outermost dimension first, as in torch
    kind: str  # the name of its format (Q4_K)
    start: int  # its offset in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of a file's header."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def refuse(self, wrong: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {wrong}")

    @property
    def architecture(self) -> str:
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise self.refuse("general.architecture is missing: it is not a model file")
        return found


def read_header(path: Path) -> GgufFile:
    """Read a file's header. Takes half a second for a large vocabulary.

    The later files of a split model get the metadata of its first file.

    Raises CheckpointError with the file if it is not a GGUF file, truncated or damaged, and
    ConfigError if the package `gguf` is not installed.
    """
    formats = known_formats()
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(
                    f"{path}: it is not a GGUF file (it does not begin with GGUF)"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = _Reader(path, data, len(data)).header(formats)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    part = SPLIT.fullmatch(path.name)
    if part is None or int(part[2]) == 1 or "general.architecture" in found.metadata:
        return found
    return replace(found, metadata=read_header(part_of(path, 1)).metadata)


def part_of(path: Path, number: int) -> Path:
    """Return the path of file `number` of a split model.

    path: the path of any of its files.
    """
    found = SPLIT.fullmatch(path.name)
    assert found is not None
    return path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf")


def known_formats() -> dict[int, tuple[str, int, int]]:
    """Return the name, values per block and bytes per block of each format, by its number. Raises
    ConfigError.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise ConfigError(
            f"GGUF files need the package gguf: {how_to_install('.[gguf]')}"
        ) from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Reader:
    """Reads one header sequentially."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = len(MAGIC)
        self._items = self._text_bytes = 0

    def header(self, formats: Mapping[int, tuple[str, int, int]]) -> GgufFile:
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise self._refuse(
                f"GGUF version {version}; only versions 2 and 3 (little-endian) are supported: "
                "convert the model again"
            )
        tensors, fields = self._take("QQ")
        self._bound(tensors, MAX_TENSORS, 24, "tensors")
        self._bound(fields, MAX_FIELDS, 13, "metadata fields")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self._text()
            (kind,) = self._take("I")
            metadata[name] = self._value(name, kind)
        found = [self._tensor(formats) for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 0 < align <= 1 << 20 or align & (align - 1):
            raise self._refuse(f"general.alignment is {align!r}, which must be a power of two")
        begin = -(-self._at // align) * align
        placed = {each.name: self._placed(each, begin) for each in found}
        if len(placed) < len(found):
            raise self._refuse("two tensors have the same name: the file is damaged")
        return GgufFile(self._path, metadata, placed)

    def _tensor(self, formats: Mapping[int, tuple[str, int, int]]) -> TensorInfo:
        """Read the description of a tensor. Its `start` is relative to the start of the data of all
        tensors.
        """
        name = self._text()
        (count,) = self._take("I")
        if not 0 < count <= 4:
            raise self._refuse(f"tensor {name!r} has {count} dimensions; only 1 to 4 are supported")
        shape = tuple(reversed(self._take("Q" * count)))
        number, start = self._take("IQ")
        if number not in formats:
            raise self._refuse(
                f"tensor {name} has format {number}, which the installed package gguf does not "
                "know: upgrade that package, or use another quantization"
            )
        kind, block, block_bytes = formats[number]
        values = math.prod(shape)
        if not 0 < values <= MAX_VALUES or shape[-1] % block:
            raise self._refuse(
                f"tensor {name} is {list(shape)}, which is not a possible shape for format "
                f"{kind}: the file is damaged"
            )
        return TensorInfo(name, shape, kind, start, values // block * block_bytes)

    def _placed(self, tensor: TensorInfo, begin: int) -> TensorInfo:
        start = begin + tensor.start
        if start + tensor.nbytes > self._size:
            raise self._refuse(
                f"tensor {tensor.name} ends at byte {start + tensor.nbytes} of a file that has "
                f"{self._size}: {ENDED}"
            )
        return TensorInfo(tensor.name, tensor.shape, tensor.kind, start, tensor.nbytes)

    def _value(self, name: str, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind in SCALARS:
            return _exact(kind, self._take(SCALARS[kind]))[0]
        if kind != ARRAY:
            raise self._refuse(f"{name} has the unknown type {kind}: the file is damaged")
        inner, count = self._take("IQ")
        if inner == TEXT:
            self._bound_items(name, count, 8)
            return [self._text() for _ in range(count)]
        if inner not in SCALARS:
            raise self._refuse(f"{name} is an array of type {inner}, which is not supported")
        self._bound_items(name, count, struct.calcsize(SCALARS[inner]))
        return list(_exact(inner, self._take(f"{count}{SCALARS[inner]}")))

    def _take(self, form: str) -> tuple[Any, ...]:
        end = self._at + struct.calcsize(f"<{form}")
        if end > self._size:
            raise self._refuse(ENDED)
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at = end
        return values

    def _text(self) -> str:
        (length,) = self._take("Q")
        if length > MAX_TEXT:
            raise self._refuse(
                f"a string has {length} bytes; the limit is {MAX_TEXT}: the file is damaged"
            )
        if (end := self._at + length) > self._size:
            raise self._refuse(ENDED)
        self._text_bytes += length
        if self._text_bytes > MAX_TEXTS:
            raise self._refuse(
                f"its strings have {self._text_bytes} bytes or more; the limit is {MAX_TEXTS}: "
                "the file is damaged"
            )
        raw = self._data[self._at : end]
        self._at = end
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._refuse(
                f"a string is not UTF-8 ({raw[:40]!r}): the file is damaged"
            ) from None

    def _bound(self, count: int, most: int, least_bytes: int, what: str) -> None:
        if count > most:
            raise self._refuse(f"it has {count} {what}; the limit is {most}: the file is damaged")
        if count * least_bytes > self._size - self._at:
            raise self._refuse(f"{count} {what} do not fit into it: {ENDED}")

    def _bound_items(self, name: str, count: int, least_bytes: int) -> None:
        self._bound(count, MAX_ITEMS, least_bytes, f"values of {name}")
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._refuse(
                f"its arrays up to {name} have {self._items} values; the limit is {MAX_ITEMS}: "
                "the file is damaged"
            )

    def _refuse(self, wrong: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {wrong}")


def _exact(kind: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert float32 values to the shortest decimals that have the same float32 value, such as
    1e-6.
    """
    if kind != FLOAT:
        return values
    return tuple(_shortest(value) for value in values)


def _shortest(value: float) -> float:
    for digits in (6, 7, 8, 9):
        text = f"{value:.{digits}g}"
        if struct.pack("<f", float(text)) == struct.pack("<f", value):
            return float(text)
    return value  # a NaN
