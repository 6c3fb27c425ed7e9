"""Who may be connected, and whose connection ends for another's."""

from __future__ import annotations

import asyncio
import resource

import pytest

from saccade.core.client import client_address
from saccade.core.errors import ConfigError
from saccade.core.metrics import Metrics
from saccade.core.options import ConnectionOptions
from saccade.edge.limits import MAX_CHUNKS_PER_TICK, ConnectionLimiter


class Member:
    """A connection that notes how it was ended."""

    def __init__(self, waits: bool = False) -> None:
        self.dropped: str | None = None
        self.waits = waits

    def check(self, now: float) -> None:
        """Nothing is ever overdue."""

    def drop(self, reason: str) -> None:
        self.dropped = reason


def crowd(most: int = 16, per_address: int | None = None) -> tuple[ConnectionLimiter, Metrics]:
    metrics = Metrics()
    return ConnectionLimiter(ConnectionOptions(most, per_address), metrics), metrics


def join(crowd: ConnectionLimiter, count: int, host: str = "10.0.0.1") -> list[Member]:
    members = [Member() for _ in range(count)]
    welcome = [crowd.join(member, host) for member in members]
    assert all(welcome)
    return members


def test_the_longest_idle_connection_makes_room() -> None:
    full, metrics = crowd(16, 16)
    members = join(full, 16)
    full.busy(members[0])
    full.idle(members[0])  # it was used since
    (newest,) = join(full, 1)
    assert [member.dropped for member in members] == [None, "crowd", *[None] * 14]
    assert newest.dropped is None
    assert metrics.value("saccade_connections") == 16


def test_a_connection_in_use_is_never_ended_for_another() -> None:
    full, _ = crowd(16, 16)
    members = join(full, 16)
    for member in members:
        full.busy(member)
    assert not full.join(Member(), "10.0.0.2")
    assert [member.dropped for member in members] == [None] * 16


def test_one_address_has_its_share_and_ends_its_own() -> None:
    shared, _ = crowd(16)  # half of it for one
    other = join(shared, 1, "10.0.0.9")[0]
    members = join(shared, 9)
    assert members[0].dropped == "crowd" and other.dropped is None
    for member in members[1:]:
        shared.busy(member)
    assert not shared.join(Member(), "10.0.0.1")
    assert shared.join(Member(), "10.0.0.9")


def test_guests_make_room_for_guests_and_are_forgotten() -> None:
    full, metrics = crowd(16, 16)
    members = join(full, 16)
    for member in members:
        full.busy(member)
    guests = [Member() for _ in range(full.reserve + 1)]
    welcome = [full.join(guest, "10.0.0.1") for guest in guests]
    assert not any(welcome)
    assert [guest.dropped for guest in guests].count("crowd") == 1 and guests[0].dropped
    for member in (*members, *guests):
        full.leave(member)
        full.leave(member)
    assert metrics.value("saccade_connections") == 0
    assert full.join(Member(), "10.0.0.1")


def test_what_waits_unread_is_bounded_over_all_connections() -> None:
    full, _ = crowd()
    assert full.hold_surplus(30 << 20) and not full.hold_surplus(3 << 20)
    full.hold_surplus(-(30 << 20))
    assert full.surplus == 0 and full.hold_surplus(3 << 20)


async def test_what_can_wait_is_done_a_few_pieces_a_turn_and_in_order() -> None:
    """However many connections ask: what is new in the event loop waits for a few pieces only."""
    full, _ = crowd()
    done: list[int] = []

    def again(number: int) -> None:
        done.append(number)
        if number < 100:
            full.soon(lambda: again(number + 100))

    def fail() -> None:
        done.append(-1)
        raise ValueError

    for number in range(100):
        full.soon(lambda number=number: again(number))  # type: ignore[misc]
    full.soon(fail)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for turn in range(201 // MAX_CHUNKS_PER_TICK + 2):
        assert len(done) <= MAX_CHUNKS_PER_TICK * turn
        await asyncio.sleep(0)
    assert done == [*range(100), -1, *range(100, 200)]


async def test_what_comes_at_once_is_begun_a_few_pieces_a_turn() -> None:
    """A request is begun where it is read, unless others were, or wait, in the same turn."""
    full, _ = crowd()
    for _ in range(3):
        assert [full.at_once() for _ in range(MAX_CHUNKS_PER_TICK + 2)] == [
            *[True] * MAX_CHUNKS_PER_TICK,
            False,
            False,
        ]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    done: list[int] = []
    for number in range(MAX_CHUNKS_PER_TICK + 1):
        full.soon(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not full.at_once(), "who waits goes first"
    await asyncio.sleep(0)
    assert len(done) == MAX_CHUNKS_PER_TICK and not full.at_once()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "", True),
    ],
)
def test_an_ipv6_network_is_one_client(one: str, other: str, same: bool) -> None:
    assert (client_address(one) == client_address(other)) is same


@pytest.mark.parametrize(("descriptors", "limit"), [(256, 160), (1024, 640), (100_000, 4096)])
def test_descriptors_are_left_for_files_and_health(
    descriptors: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    found = ConnectionLimiter(ConnectionOptions(), Metrics())
    assert (found.limit, found.limit_per_address) == (limit, limit // 2)
    with pytest.raises(ConfigError, match=r"max_connections=999999.*ulimit"):
        ConnectionLimiter(ConnectionOptions(max_connections=999_999), Metrics())


def test_who_has_sent_what_nobody_has_looked_at_is_not_idle() -> None:
    host, _ = crowd(16, 2)
    asking, idle, new = Member(waits=True), Member(), Member()
    assert host.join(asking, "1.1.1.1") and host.join(idle, "1.1.1.1")
    assert host.join(new, "1.1.1.1")
    assert (asking.dropped, idle.dropped) == (None, "crowd")
