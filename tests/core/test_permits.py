"""Permits: how many requests may be in flight, in all and of one of several keys."""

from __future__ import annotations

import pytest

from saccade.core.client import Client, Permits
from saccade.core.errors import Overloaded

A, B = Client("a", limited=True), Client("b", limited=True)


def test_more_than_the_most_are_refused_by_the_option_that_sets_it() -> None:
    permits = Permits(1, "--most")
    with permits.acquire(), pytest.raises(Overloaded, match=r"1 requests .*--most"):
        permits.check()
    permits.check()


def test_one_of_several_keys_has_half_of_them() -> None:
    permits = Permits(4, "--most")
    with permits.acquire(A), permits.acquire(A):
        with pytest.raises(Overloaded, match="half of --most"):
            permits.check(A)
        permits.check(B)


def test_it_says_how_many_are_taken_and_when_none_is() -> None:
    told: list[int] = []
    permits = Permits(4, "--most", told.append)
    assert permits.idle.is_set()
    with permits.acquire(A), permits.acquire(B):
        assert not permits.idle.is_set()
    assert permits.idle.is_set()
    assert told == [1, 2, 1, 0]
