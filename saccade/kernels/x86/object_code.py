"""Machine code from an object file, loaded into this process: what a linker does for the few kinds
of references that LLVM writes here. So a process that finds its code on disk needs no LLVM, whose
library takes a tenth of a second to load.

Owns the memory of loaded code, which lives as long as the process. Format: the System V ABI's
chapters on object files, and its supplement for AMD64.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"
"""Of files for 64 bits, the lowest byte first."""
AMD64 = 62
WRITABLE, LOADED = 1, 2
"""Flags of sections."""
SYMBOLS, NOTHING, REFERENCES = 2, 8, 4
"""Kinds of sections: a table of symbols, bytes that begin as 0, and places to fill in."""
UNWINDING = 0x70000001
UNDEFINED, ABSOLUTE, COMMON = 0, 0xFFF1, 0xFFF2
"""In place of a symbol's section."""
ADDRESS, NEAR, NEAR_CALL, FAR = 1, 2, 4, 24
"""Kinds of references: an address in 8 bytes, a distance in 4, the same of a call, and in 8."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
REFERENCE = struct.Struct("<QQq")


class NotLoadable(Exception):
    """An object file that needs more of a linker than there is here."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    content: memoryview
    size: int
    link: int
    about: int
    align: int

    @property
    def loaded(self) -> bool:
        return bool(self.flags & LOADED) and self.kind != UNWINDING and self.size > 0


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    size: int


def load_code(code: bytes, names: Sequence[str]) -> dict[str, int]:
    """Load an object file for good. Returns the addresses of the functions with these names.

    Raises NotLoadable.
    """
    sections = _sections(code)
    table = next(section for section in sections if section.kind == SYMBOLS)
    symbols = _symbols(table, sections[table.link].content)
    memory, places = _lay_out(sections, symbols)
    addresses = [_locate(symbol, places, at) for at, symbol in enumerate(symbols)]
    for section in sections:
        if section.kind == REFERENCES and section.about in places:
            for reference in REFERENCE.iter_unpack(section.content):
                _fill_in(memory, places[section.about], addresses, *reference)
    memory.protect()
    found = {symbol.name: at for symbol, at in zip(symbols, addresses) if at is not None}
    return {name: found[name] for name in names}


def _sections(code: bytes) -> list[_Section]:
    if not code.startswith(MAGIC):
        raise NotLoadable("another format")
    whole = memoryview(code)
    _, machine, _, _, _, begin, _, _, _, _, size, count, _ = HEADER.unpack_from(code)
    if machine != AMD64 or size != SECTION.size:
        raise NotLoadable("another processor")
    found = []
    for _, kind, flags, _, offset, nbytes, link, about, align, _ in SECTION.iter_unpack(
        whole[begin : begin + count * size]
    ):
        content = whole[offset : offset + (0 if kind == NOTHING else nbytes)]
        found.append(_Section(kind, flags, content, nbytes, link, about, max(1, align)))
    return found


def _symbols(table: _Section, names: memoryview) -> list[_Symbol]:
    text = bytes(names)
    return [
        _Symbol(text[name : text.index(0, name)].decode(), section, value, size)
        for name, _, _, section, value, size in SYMBOL.iter_unpack(table.content)
    ]


class _Memory:
    """Whole pages: first what may be written, and behind it what may be run and read."""

    def __init__(self, writable: int, runnable: int) -> None:
        self.border = -(-writable // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, self.border + runnable)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        _LOADED.append(self)

    def put(self, address: int, content: bytes | memoryview) -> None:
        at = address - self.address
        self._pages[at : at + len(content)] = content

    def protect(self) -> None:
        """Make the code runnable, and no longer writable."""
        start = ctypes.c_void_p(self.address + self.border)
        size = ctypes.c_size_t(len(self._pages) - self.border)
        if ctypes.CDLL(None, use_errno=True).mprotect(start, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise NotLoadable("memory may not be run")


_LOADED: list[_Memory] = []


def _lay_out(
    sections: Sequence[_Section], symbols: Sequence[_Symbol]
) -> tuple[_Memory, dict[int, int]]:
    """Copy what is loaded into memory. Returns it, and the address of each section.

    A symbol of no section has memory of its own, by -1 minus its number.
    """
    wanted = [
        (number, section.size, section.align, bool(section.flags & WRITABLE))
        for number, section in enumerate(sections)
        if section.loaded
    ]
    wanted += [
        (-1 - number, symbol.size, symbol.value, True)
        for number, symbol in enumerate(symbols)
        if symbol.section == COMMON
    ]
    ends = {True: 0, False: 0}
    offsets = {}
    for number, size, align, writable in wanted:
        offsets[number] = -(-ends[writable] // align) * align
        ends[writable] = offsets[number] + size
    memory = _Memory(ends[True], ends[False])
    places = {
        number: memory.address + (0 if writable else memory.border) + offsets[number]
        for number, _, _, writable in wanted
    }
    for number, place in places.items():
        if number >= 0:
            memory.put(place, sections[number].content)
    return memory, places


def _locate(symbol: _Symbol, places: dict[int, int], number: int) -> int | None:
    """Return a symbol's address, or None for what is not loaded and not of the C library."""
    if symbol.section == UNDEFINED:
        return _address_in_process(symbol.name)
    if symbol.section == ABSOLUTE:
        return symbol.value
    if symbol.section == COMMON:
        return places[-1 - number]
    place = places.get(symbol.section)
    return None if place is None else place + symbol.value


def _address_in_process(name: str) -> int | None:
    process = ctypes.CDLL(None)
    if not name or not hasattr(process, name):
        return None
    return ctypes.cast(process[name], ctypes.c_void_p).value


def _fill_in(
    memory: _Memory,
    begin: int,
    addresses: Sequence[int | None],
    offset: int,
    info: int,
    addend: int,
) -> None:
    """Write one reference of a section that begins at an address."""
    target, place, kind = addresses[info >> 32], begin + offset, info & 0xFFFFFFFF
    if target is None:
        raise NotLoadable("a symbol that is nowhere")
    try:
        if kind == ADDRESS:
            written = struct.pack("<Q", target + addend)
        elif kind == FAR:
            written = struct.pack("<q", target + addend - place)
        elif kind in (NEAR, NEAR_CALL):
            written = struct.pack("<i", target + addend - place)
        else:
            raise NotLoadable(f"references of kind {kind}")
    except struct.error as error:
        raise NotLoadable("a reference too far away") from error
    memory.put(place, written)
