from __future__ import annotations

import random

import pytest

from saccade.cache.pages import DUMMY_PAGE, PagePool


def consecutive(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def test_the_dummy_page_is_never_handed_out() -> None:
    pool = PagePool(8, 16)
    assert DUMMY_PAGE not in pool.allocate(7) and pool.free == 0


def test_a_sequence_that_grows_stays_one_run() -> None:
    pool = PagePool(1000, 16)
    tables: list[list[int]] = [pool.allocate(5) for _ in range(4)]
    for _ in range(40):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert all(consecutive(table) for table in tables)
    pool.audit(tables)


def test_released_runs_merge_again() -> None:
    pool = PagePool(101, 1)
    tables = [pool.allocate(10) for _ in range(10)]
    for table in tables[::2] + tables[1::2]:
        pool.release(table)
    assert consecutive(pool.allocate(100)) and pool.free == 0


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(3)
    pool.retain(pages[:1])
    pool.release(pages)
    assert pool.free == 2
    pool.release(pages[:1])
    assert pool.free == 3


def test_scattered_pages_are_still_found() -> None:
    pool = PagePool(101, 1)
    pages = pool.allocate(100)
    pool.release(pages[::2])
    assert sorted(pool.allocate(50)) == sorted(pages[::2])


def test_the_audit_finds_a_lost_page_and_a_wrong_count() -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(2)
    pool.audit([pages])
    with pytest.raises(AssertionError, match="lost"):
        pool.audit([pages[:1]])
    with pytest.raises(AssertionError, match="count"):
        pool.audit([pages, pages])


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError):
        PagePool(4, 1).allocate(4)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_never_loses_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(rng.choice([2, 10, 200]), 4)
    held: list[list[int]] = []
    for _ in range(400):
        event = rng.random()
        if event < 0.5 and pool.free:
            after = rng.choice(held)[-1] if held and rng.random() < 0.7 else None
            held.append(pool.allocate(rng.randint(1, pool.free), after))
        elif event < 0.6 and held:
            held.append(list(rng.choice(held)))
            pool.retain(held[-1])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.audit(held)
