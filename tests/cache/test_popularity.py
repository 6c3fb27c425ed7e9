"""How often pictures are shown: recent uses count, old fame fades, and memory is bounded."""

from __future__ import annotations

from saccade.cache.embeddings import (
    MAX_USES_COUNTED,
    MIN_CACHED_IMAGES,
    USES_PER_CACHED_IMAGE,
    Popularity,
)
from saccade.core.types import ImageKey


def key(number: int) -> ImageKey:
    return ImageKey(number.to_bytes(32, "big"), bytes(16))


def test_uses_count_up_to_a_bound() -> None:
    popularity = Popularity()
    assert popularity.of(key(1)) == 1
    for _ in range(3):
        popularity.use(key(1), 10)
    assert popularity.of(key(1)) == 3
    for _ in range(50):
        popularity.use(key(1), 10)
    assert popularity.of(key(1)) == MAX_USES_COUNTED


def test_old_fame_fades() -> None:
    popularity = Popularity()
    for _ in range(4):
        popularity.use(key(1), 10)
    for number in range(USES_PER_CACHED_IMAGE * MIN_CACHED_IMAGES - 4):
        popularity.use(key(2 + number % 7), 10)
    assert popularity.of(key(1)) == 2


def test_what_was_shown_once_is_forgotten_in_the_end() -> None:
    popularity = Popularity()
    for number in range(100_000):
        popularity.use(key(number), 300)
        assert len(popularity) <= 2 * USES_PER_CACHED_IMAGE * 300
