from __future__ import annotations

import random

import pytest

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.config import EmbeddingBudgets, embedding_file_bytes
from saccade.core.plan import Move
from saccade.core.types import ImageKey
from tests.helpers.breadth import broad

A, B, C, D = (ImageKey(bytes([n] * 32), bytes(16)) for n in range(4))


def cache(
    device: int = 100, host: int = 0, disk: int = 0, saved: tuple[tuple[ImageKey, int], ...] = ()
) -> EmbeddingCache:
    """A token is a byte in every tier."""
    return EmbeddingCache(EmbeddingBudgets(device, host, disk), 1, saved, file_bytes=int)


def use(embeddings: EmbeddingCache, key: ImageKey) -> None:
    embeddings.pin(key)
    embeddings.unpin(key)


def gone(*keys: ImageKey, tokens: int = 50) -> list[Move]:
    return [Move(key, "device", None, tokens) for key in keys]


def test_the_disk_counts_what_its_files_take() -> None:
    """However small the embeddings: each is a file with a header."""
    budgets = EmbeddingBudgets(100, 0, 2 * embedding_file_bytes(1))
    embeddings = EmbeddingCache(budgets, 1)
    went = []
    for key in (A, B, C):
        embeddings.admit(key, 1)
        use(embeddings, key)
        moves, kept = embeddings.save(key)
        assert kept
        went += moves
    assert went == [Move(A, "disk", None, 1)] and len(embeddings.tiers["disk"]) == 2
    assert embeddings.tiers["disk"].used_bytes == budgets.disk_bytes
    again = EmbeddingCache(budgets, 1, [(A, 1), (B, 1), (C, 1)])
    assert again.beyond_budget == [Move(A, "disk", None, 1)]


def test_of_equals_the_least_recently_used_goes_first() -> None:
    embeddings = cache()
    assert embeddings.admit(A, 50) == embeddings.admit(B, 50) == []
    use(embeddings, A)
    use(embeddings, B)
    use(embeddings, A)
    use(embeddings, B)
    assert embeddings.admit(C, 50) == gone(A)
    assert embeddings.locate(B) == "device" and embeddings.locate(A) is None
    assert (embeddings.device.used_bytes, embeddings.device.evictions, len(embeddings.device)) == (
        100,
        1,
        2,
    )


def test_what_was_used_often_outlasts_what_was_used_once() -> None:
    embeddings = cache()
    embeddings.admit(A, 50)
    for _ in range(3):
        use(embeddings, A)
    embeddings.admit(B, 50)
    assert embeddings.admit(C, 50) == gone(B)


def test_what_was_used_often_long_ago_goes_in_the_end() -> None:
    embeddings = cache()
    embeddings.admit(A, 50)
    for _ in range(5):
        use(embeddings, A)
    keys = [ImageKey(n.to_bytes(32, "big"), b"x" * 16) for n in range(40)]
    for key in keys:
        embeddings.admit(key, 50)
    assert embeddings.locate(A) is None


def test_what_was_shown_often_is_worth_more_when_it_comes_back() -> None:
    embeddings = cache()
    embeddings.admit(A, 50)
    for _ in range(3):
        use(embeddings, A)
    assert embeddings.admit(B, 100) == gone(A)
    assert embeddings.admit(A, 50) == gone(B, tokens=100)
    use(embeddings, A)
    embeddings.admit(C, 50)
    for _ in range(2):
        use(embeddings, C)
    assert embeddings.admit(D, 50) == gone(C)


def test_a_large_picture_is_worth_more_per_byte_than_a_small_one() -> None:
    embeddings = cache(5000)
    embeddings.admit(A, 4000)
    embeddings.admit(B, 1000)
    assert embeddings.admit(C, 1000) == gone(B, tokens=1000)


def test_what_is_pinned_is_never_evicted() -> None:
    embeddings = cache()
    for key in (A, B):
        embeddings.admit(key, 50)
        embeddings.pin(key)
    embeddings.pin(A)
    embeddings.unpin(A)
    embeddings.unpin(B)
    assert embeddings.device.held == {A}
    assert embeddings.fits(50) and not embeddings.fits(51)
    assert embeddings.admit(C, 70) == gone(B)
    assert embeddings.device.used_bytes == 120


def test_pictures_of_the_same_chunk_are_spared_while_there_are_others() -> None:
    embeddings = cache()
    embeddings.admit(A, 50)
    embeddings.admit(B, 50)
    assert embeddings.admit(C, 50, keep={A}) == gone(B)
    assert embeddings.admit(D, 100, keep={A}) == gone(C, A)


def test_a_picture_larger_than_the_budget_is_admitted_alone() -> None:
    embeddings = cache()
    embeddings.admit(A, 60)
    assert embeddings.fits(1000)
    assert embeddings.admit(B, 1000) == gone(A, tokens=60)
    assert embeddings.admit(C, 10) == gone(B, tokens=1000)
    assert embeddings.device.used_bytes == 10


def test_the_device_evicts_to_the_host_and_the_host_to_nowhere() -> None:
    embeddings = cache(50, host=50)
    embeddings.admit(A, 50)
    assert embeddings.admit(B, 50) == [Move(A, "device", "host", 50)]
    assert embeddings.admit(C, 50) == [Move(A, "host", None, 50), Move(B, "device", "host", 50)]
    assert embeddings.locate(A) is None and embeddings.ready(B) and embeddings.locate(B) == "host"
    assert embeddings.to_device(B) == [Move(C, "device", "host", 50), Move(B, "host", "device", 50)]
    assert embeddings.tiers["host"].used_bytes == embeddings.device.used_bytes == 50


def test_what_is_too_large_for_the_host_is_dropped() -> None:
    embeddings = cache(50, host=40)
    embeddings.admit(A, 50)
    assert embeddings.admit(B, 50) == gone(A)


def test_what_is_on_disk_is_read_before_it_is_ready() -> None:
    embeddings = cache(50, disk=100)
    embeddings.admit(A, 50)
    assert embeddings.save(A) == ([], True)
    embeddings.admit(B, 50)
    assert embeddings.locate(A) == "disk" and embeddings.on_disk(A) and not embeddings.ready(A)
    assert embeddings.fetch(A) == Move(A, "disk", "staged", 50)
    assert not embeddings.ready(A)
    embeddings.fetched(A, whole=True)
    assert embeddings.ready(A) and not embeddings.on_disk(A)
    assert embeddings.to_device(A) == [*gone(B), Move(A, "staged", "device", 50)]
    assert embeddings.save(A) == ([], False), "it is still there"


def test_the_disk_evicts_but_not_what_is_being_read() -> None:
    embeddings = cache(1000, disk=100, saved=((A, 50), (B, 50)))
    embeddings.fetch(A)
    embeddings.admit(C, 50)
    assert embeddings.save(C) == ([Move(B, "disk", None, 50)], True)
    embeddings.fetched(A, whole=False)
    assert embeddings.locate(A) is None and embeddings.tiers["disk"].used_bytes == 50


def test_what_could_not_be_read_is_encoded_and_saved_again() -> None:
    embeddings = cache(50, disk=100, saved=((A, 50),))
    embeddings.fetch(A)
    embeddings.fetched(A, whole=False)
    assert embeddings.locate(A) is None, "it is not asked of the disk again"
    embeddings.admit(A, 50)
    assert embeddings.save(A) == ([], True)


def test_a_smaller_budget_than_before_removes_the_oldest_files() -> None:
    embeddings = cache(disk=100, saved=((A, 50), (B, 50), (C, 50)))
    assert embeddings.beyond_budget == [Move(A, "disk", None, 50)]
    assert [embeddings.locate(key) for key in (A, B, C)] == [None, "disk", "disk"]


def test_what_could_not_be_written_is_not_on_disk() -> None:
    embeddings = cache(50, disk=100)
    embeddings.admit(A, 50)
    embeddings.save(A)
    embeddings.not_saved(A)
    assert embeddings.locate(A) == "device" and embeddings.tiers["disk"].used_bytes == 0
    embeddings.admit(B, 50)
    assert embeddings.locate(A) is None and embeddings.why_missing(A) == "evicted"


@pytest.mark.parametrize("seed", broad(range(20), keep=range(5)))
def test_no_tier_exceeds_its_budget_and_every_move_is_of_something_there(seed: int) -> None:
    rng = random.Random(seed)
    embeddings = cache(rng.randrange(50, 300), rng.randrange(300), rng.randrange(300))
    there: dict[str, set[ImageKey]] = {
        "device": set(),
        "host": set(),
        "disk": set(),
        "staged": set(),
    }

    def carry_out(moves: list[Move]) -> None:
        for move in moves:
            there[move.source].remove(move.key)
            if move.target:
                there[move.target].add(move.key)

    for _ in range(2000):
        number = int(rng.paretovariate(0.8)) % 50
        key, tokens = ImageKey(number.to_bytes(32, "big"), bytes(16)), 1 + number % 40
        embeddings.count_lookup(embeddings.locate(key))
        if embeddings.locate(key) == "host":
            carry_out(embeddings.to_device(key))
        elif embeddings.locate(key) == "disk":
            embeddings.fetch(key)
            embeddings.fetched(key, whole=True)
            there["staged"].add(key)
            carry_out(embeddings.to_device(key))
        elif embeddings.locate(key) is None:
            carry_out(embeddings.admit(key, tokens))
            there["device"].add(key)
            removed, saved = embeddings.save(key)
            carry_out(removed)
            there["disk"] |= {key} if saved else set()
        use(embeddings, key)
        for tier, shelf in embeddings.tiers.items():
            assert all(key in shelf for key in there[tier]) and len(shelf) == len(there[tier])
            assert (
                shelf.used_bytes
                == sum(1 + int.from_bytes(key.digest, "big") % 40 for key in there[tier])
                <= shelf.budget_bytes
            )
        assert not there["device"] & there["host"] and not there["staged"]


def test_an_embedding_that_nobody_waited_for_goes_first_until_somebody_wants_it() -> None:
    embeddings = cache(200)
    for key in (A, B, C):
        embeddings.admit(key, 50, idle=key != A)
        embeddings.pin(key, idle=key != A)
        embeddings.unpin(key)
    use(embeddings, C)
    assert embeddings.admit(D, 100) == gone(B), "though it came after the first"
    assert embeddings.locate(A) == embeddings.locate(C) == "device"
