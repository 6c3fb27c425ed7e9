"""A loader for ELF object files. It supports the few relocation types that LLVM emits for kernels.
With it, a process that finds its code in the cache does not load LLVM, which takes 0.1 s.

Loaded code is never freed. The format is defined by the System V ABI, in the chapters on object
files, and by its AMD64 supplement.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"
"""The first bytes of a supported file: ELF, 64 bits, little-endian."""
EM_X86_64 = 62
SHF_WRITE, SHF_ALLOC = 1, 2
SHT_SYMTAB, SHT_NOBITS, SHT_RELA = 2, 8, 4
SHT_X86_64_UNWIND = 0x70000001
SHN_UNDEF, SHN_ABS, SHN_COMMON = 0, 0xFFF1, 0xFFF2
"""Special section indices of symbols."""
R_X86_64_64, R_X86_64_PC32, R_X86_64_PLT32, R_X86_64_PC64 = 1, 2, 4, 24
"""Relocation types."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")


class NotLoadable(Exception):
    """Raised for an object file that needs a full linker."""


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
        return bool(self.flags & SHF_ALLOC) and self.kind != SHT_X86_64_UNWIND and self.size > 0


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    size: int


def load_code(code: bytes, names: Sequence[str]) -> dict[str, int]:
    """Load an object file, and return the addresses of the functions with these names.

    The code stays loaded until the process exits. Raises NotLoadable.
    """
    sections = _sections(code)
    table = next(section for section in sections if section.kind == SHT_SYMTAB)
    symbols = _symbols(table, sections[table.link].content)
    memory, places = _load_sections(sections, symbols)
    addresses = [_resolve(symbol, places, index) for index, symbol in enumerate(symbols)]
    for section in sections:
        if section.kind == SHT_RELA and section.about in places:
            for reference in RELOCATION.iter_unpack(section.content):
                _relocate(memory, places[section.about], addresses, *reference)
    memory.protect()
    found = {symbol.name: at for symbol, at in zip(symbols, addresses) if at is not None}
    return {name: found[name] for name in names}


def _sections(code: bytes) -> list[_Section]:
    if not code.startswith(MAGIC):
        raise NotLoadable("not a 64-bit ELF file")
    view = memoryview(code)
    _, machine, _, _, _, begin, _, _, _, _, size, count, _ = HEADER.unpack_from(code)
    if machine != EM_X86_64 or size != SECTION.size:
        raise NotLoadable("not for x86-64")
    sections = []
    for _, kind, flags, _, offset, nbytes, link, about, align, _ in SECTION.iter_unpack(
        view[begin : begin + count * size]
    ):
        content = view[offset : offset + (0 if kind == SHT_NOBITS else nbytes)]
        sections.append(_Section(kind, flags, content, nbytes, link, about, max(1, align)))
    return sections


def _symbols(table: _Section, names: memoryview) -> list[_Symbol]:
    text = bytes(names)
    return [
        _Symbol(text[name : text.index(0, name)].decode(), section, value, size)
        for name, _, _, section, value, size in SYMBOL.iter_unpack(table.content)
    ]


class _Memory:
    def __init__(self, writable: int, runnable: int) -> None:
        self.border = -(-writable // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, self.border + runnable)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        _LOADED.append(self)

    def put(self, address: int, content: bytes | memoryview) -> None:
        start = address - self.address
        self._pages[start : start + len(content)] = content

    def protect(self) -> None:
        """Make the code executable and read-only."""
        start = ctypes.c_void_p(self.address + self.border)
        size = ctypes.c_size_t(len(self._pages) - self.border)
        if ctypes.CDLL(None, use_errno=True).mprotect(start, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise NotLoadable("memory cannot be made executable")


_LOADED: list[_Memory] = []


def _load_sections(
    sections: Sequence[_Section], symbols: Sequence[_Symbol]
) -> tuple[_Memory, dict[int, int]]:
    """Copy sections into memory, and allocate memory for each common symbol.

    Returns the memory, and addresses by section index. The key of a common symbol is -1 minus the
    symbol's index.
    """
    allocations = [
        (index, section.size, section.align, bool(section.flags & SHF_WRITE))
        for index, section in enumerate(sections)
        if section.loaded
    ]
    allocations += [
        (-1 - i, symbol.size, symbol.value, True)
        for i, symbol in enumerate(symbols)
        if symbol.section == SHN_COMMON
    ]
    ends = {True: 0, False: 0}
    offsets = {}
    for number, size, align, writable in allocations:
        offsets[number] = -(-ends[writable] // align) * align
        ends[writable] = offsets[number] + size
    memory = _Memory(ends[True], ends[False])
    addresses = {
        number: memory.address + (0 if writable else memory.border) + offsets[number]
        for number, _, _, writable in allocations
    }
    for number, address in addresses.items():
        if number >= 0:
            memory.put(address, sections[number].content)
    return memory, addresses


def _resolve(symbol: _Symbol, bases: dict[int, int], number: int) -> int | None:
    """Return a symbol's address, or `None` if neither the file nor the process defines it."""
    if symbol.section == SHN_UNDEF:
        return _address_in_process(symbol.name)
    if symbol.section == SHN_ABS:
        return symbol.value
    if symbol.section == SHN_COMMON:
        return bases[-1 - number]
    base = bases.get(symbol.section)
    return None if base is None else base + symbol.value


def _address_in_process(name: str) -> int | None:
    process = ctypes.CDLL(None)
    if not name or not hasattr(process, name):
        return None
    return ctypes.cast(process[name], ctypes.c_void_p).value


def _relocate(
    memory: _Memory,
    begin: int,
    addresses: Sequence[int | None],
    offset: int,
    info: int,
    addend: int,
) -> None:
    target, address, type_ = addresses[info >> 32], begin + offset, info & 0xFFFFFFFF
    if target is None:
        raise NotLoadable("an undefined symbol")
    try:
        if type_ == R_X86_64_64:
            written = struct.pack("<Q", target + addend)
        elif type_ == R_X86_64_PC64:
            written = struct.pack("<q", target + addend - address)
        elif type_ in (R_X86_64_PC32, R_X86_64_PLT32):
            written = struct.pack("<i", target + addend - address)
        else:
            raise NotLoadable(f"relocation type {type_}")
    except struct.error as error:
        raise NotLoadable("a relocation out of range") from error
    memory.put(address, written)
