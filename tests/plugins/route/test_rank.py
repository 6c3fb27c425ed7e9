from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.edge.rank import SLACK, most, rank

_chance = random.Random(0)
KEYS = [_chance.randbytes(32) for _ in range(4000)]
names = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)
loads = st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=12)


def first(key: bytes, replicas: list[str]) -> str:
    return rank([key], replicas, {})[0]


def fleet(size: int) -> list[str]:
    return [f"http://10.0.0.{number}:8000" for number in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_replica_that_comes_takes_its_share_of_keys_and_moves_no_other(size: int) -> None:
    before, after = fleet(size), fleet(size + 1)
    moved = [(first(key, before), first(key, after)) for key in KEYS]
    changed = [new for old, new in moved if old != new]
    assert set(changed) == {after[-1]}
    share = len(KEYS) / (size + 1)
    assert abs(len(changed) - share) < 5 * share**0.5


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_replica_that_goes_moves_its_own_keys_and_spreads_them(size: int) -> None:
    everyone = fleet(size)
    left = everyone[1:]
    homes = Counter(first(key, left) for key in KEYS if first(key, everyone) == everyone[0])
    for key in KEYS:
        if (home := first(key, everyone)) != everyone[0]:
            assert first(key, left) == home
    assert homes.total() < len(KEYS) / size + 5 * (len(KEYS) / size) ** 0.5
    share = homes.total() / len(left)
    assert set(homes) == set(left)
    assert all(abs(count - share) < 5 * share**0.5 for count in homes.values())


@given(st.binary(max_size=40), names, loads, st.randoms(use_true_random=False))
def test_every_router_gives_the_same_answer_in_whatever_order_it_knows_the_replicas(
    key: bytes, replicas: list[str], load: dict[str, int], chance: random.Random
) -> None:
    shuffled = chance.sample(replicas, len(replicas))
    assert rank([key], replicas, load) == rank([key], shuffled, load)
    assert rank([], replicas, load) == rank([], shuffled, load)
    assert sorted(rank([key], replicas, load)) == sorted(replicas)


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(0, 12), st.lists(st.integers(0, 5), max_size=300))
def test_no_replica_is_given_more_than_the_bound(size: int, slack: int, shown: list[int]) -> None:
    """Few keys, many requests, none of which ends: each goes where it should, or one further."""
    load = dict.fromkeys(fleet(size), 0)
    for key in shown:
        bound = most(list(load.values()), slack)
        chosen = rank([bytes([key])], fleet(size), load, slack)[0]
        load[chosen] += 1
        assert load[chosen] <= bound <= max(slack, 1.25 * sum(load.values()) / size + 1)


def test_a_busy_replica_is_left_for_the_same_second_one_and_comes_back_when_it_is_not() -> None:
    replicas = fleet(4)
    home, second, *_ = rank([b"image"], replicas, {})
    busy = {home: SLACK}
    assert [rank([b"image"], replicas, busy)[0] for _ in range(3)] == [second] * 3
    assert rank([b"image"], replicas, busy)[-1] == home
    assert rank([b"image"], replicas, {home: SLACK - 1})[0] == home
    even = dict.fromkeys(replicas, 100)
    assert rank([b"image"], replicas, even)[0] == home, "all are as busy: nobody is above the mean"


def test_without_a_key_whoever_has_least_to_do_comes_first() -> None:
    replicas = fleet(3)
    assert rank([], replicas, {replicas[0]: 2, replicas[1]: 1}) == [*reversed(replicas)]
    assert rank([b"x"], [], {}) == []


def test_the_oldest_key_decides() -> None:
    for key in KEYS[:50]:
        assert rank([key, b"newer"], fleet(5), {}) == rank([key], fleet(5), {})
