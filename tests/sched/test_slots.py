"""The arena's book: never two owners for one byte, and kept pixels make room, oldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.core.types import Image, ImageKey
from saccade.sched.images.slots import ALIGNMENT_BYTES, Allocator, PixelSlots


def key(number: int) -> ImageKey:
    return ImageKey(bytes([number]) * 32, bytes(16))


def test_a_full_arena_says_none_and_takes_again_what_is_freed() -> None:
    arena = Allocator(16 * ALIGNMENT_BYTES)
    assert [arena.allocate(ALIGNMENT_BYTES) for _ in range(16)] == [
        n * ALIGNMENT_BYTES for n in range(16)
    ]
    assert arena.allocate(1) is None
    arena.free(3 * ALIGNMENT_BYTES)
    arena.free(5 * ALIGNMENT_BYTES)
    assert arena.allocate(2 * ALIGNMENT_BYTES) is None, "no hole is that large"
    arena.free(4 * ALIGNMENT_BYTES)
    assert arena.allocate(3 * ALIGNMENT_BYTES) == 3 * ALIGNMENT_BYTES, "holes that touch are one"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGNMENT_BYTES)), max_size=60))
def test_slots_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    size = 16 * ALIGNMENT_BYTES
    arena = Allocator(size)
    held: dict[int, int] = {}
    for release, number in steps:
        if release and held:
            offset = list(held)[number % len(held)]
            arena.free(offset)
            del held[offset]
        elif (found := arena.allocate(number)) is not None:
            assert found % ALIGNMENT_BYTES == 0 and found + number <= size
            assert all(found + number <= at or at + length <= found for at, length in held.items())
            held[found] = number
    for offset in held:
        arena.free(offset)
    assert arena.allocate(size) == 0


def image(number: int, rows: int = 4, columns: int = 4) -> Image:
    return Image(key(number), (), rows * columns // 4, rows * columns, (16 * rows, 16 * columns))


def test_kept_pixels_make_room_least_recently_used_first() -> None:
    slots = PixelSlots(4 * 3 * ALIGNMENT_BYTES)
    for number in range(4):
        slot = slots.reserve(image(number))
        assert slot is not None and (slot.height, slot.width) == (64, 64)
        slots.keep_pixels(key(number), slot)
    assert slots.bytes_in_use == 0
    again = slots.reuse(key(0))
    assert again is not None and slots.bytes_in_use == again.nbytes
    slots.keep_pixels(key(0), again)
    assert slots.reserve(image(4)) is not None
    assert [key(number) in slots for number in range(4)] == [True, False, True, True]
    large = image(5, rows=16)
    assert slots.reserve(large) is None, "one slot is in use"
    assert slots.fits(large) and not slots.fits(image(6, rows=16, columns=5))
