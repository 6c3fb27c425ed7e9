from __future__ import annotations

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.types import ImageKey

A, B, C = (ImageKey(bytes([n] * 32), bytes(16)) for n in range(3))


def test_the_least_recently_used_goes_first() -> None:
    cache = EmbeddingCache(100, 1)
    assert cache.admit(A, 50, 1) == cache.admit(B, 50, 1) == ()
    cache.touch(A)
    assert cache.admit(C, 50, 1) == (B,)
    assert cache.locate(A) == "device" and cache.locate(B) is None
    assert (cache.used_bytes, cache.evictions, len(cache)) == (100, 1, 2)


def test_what_is_pinned_is_never_evicted() -> None:
    cache = EmbeddingCache(100, 1)
    for key in (A, B):
        cache.admit(key, 50, 1)
        cache.pin(key)
    cache.pin(A)
    cache.unpin(A)
    cache.unpin(B)
    assert cache.pinned == {A}
    assert cache.fits(50) and not cache.fits(51)
    assert cache.admit(C, 70, 1) == (B,)
    assert cache.used_bytes == 120


def test_unpinning_makes_a_picture_the_most_recent() -> None:
    cache = EmbeddingCache(100, 1)
    cache.admit(A, 50, 1)
    cache.admit(B, 50, 1)
    cache.pin(A)
    cache.unpin(A)
    assert cache.admit(C, 50, 1) == (B,)


def test_a_picture_larger_than_the_budget_is_admitted_alone() -> None:
    cache = EmbeddingCache(100, 1)
    cache.admit(A, 60, 1)
    assert cache.fits(1000)
    assert cache.admit(B, 1000, 1) == (A,)
    assert cache.admit(C, 10, 1) == (B,)
    assert cache.used_bytes == 10
