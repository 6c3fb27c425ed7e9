"""What clients have pinned stays in host memory and on disk for its time, within a share of each,
and nobody's is lost for another's sake.
"""

from __future__ import annotations

from itertools import count

import pytest

from saccade.cache.content import Content, page_name, root_name, state_name
from saccade.cache.pages import PagePool
from saccade.cache.pins import PinTable
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.config import embedding_file_bytes
from saccade.core.plan import PageTier
from saccade.plugins.tiers.kept_pages import CacheTierState, OffloadedPages

PAGE = 2
MODEL = b"model"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Case:
    """A prefix cache that is empty after each prompt: what is kept of it lies in tiers of so many
    pages.
    """

    def __init__(self, share: float = 0.5, host: int = 0, disk: int = 0) -> None:
        self.clock = Clock()
        self.fresh = count(100)
        files = disk * embedding_file_bytes(1)
        self.kept = OffloadedPages(
            MODEL, 1, 0, files, host_bytes=host, pinned_share=share, clock=self.clock
        )
        self.pool = PagePool(41, PAGE)
        pins: PinTable[Node] = PinTable(int(share * 40), self.clock)
        self.cache = PrefixCache(self.pool, pins, kept=self.kept)

    def serve(
        self, first: int, pages: int = 4, client: str = "a", seconds: int = 0, *, evict: bool = True
    ) -> list[bytes]:
        """Compute a prompt, pin it, evict it. The names of its pages."""
        content = Content([first, *[2] * (pages * PAGE)], (), (), "")
        path = self.cache.find(content)
        node = self.cache.hold(content, path)
        self.cache.hit(path, client)
        table = [step.page for step in path]
        table += self.pool.allocate(pages + 1 - len(path))
        node = self.cache.extend(node, content, table, pages)
        if seconds:
            self.cache.pin(node, content, pages, client, seconds)
        self.cache.leave(node, content, table, pages)
        if evict:
            self.cache.evict(self.cache.evictable)
        self.kept.take_moves()
        names = [root_name(MODEL, *content.partition)]
        for index in range(pages):
            names.append(page_name(names[-1], content.page(index, PAGE)))
        return names[1:]

    def press(self, rounds: int = 12) -> None:
        """Prompts of another client that nobody has sent before."""
        for _ in range(rounds):
            self.serve(next(self.fresh), client="other")


def held(tier: CacheTierState, names: list[bytes]) -> list[bool]:
    return [name in tier for name in names]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_pinned_prompt_outlives_pressure_in_a_tier_until_its_time_is_over(
    place: PageTier,
) -> None:
    """Though on the device its pin has given way."""
    case = Case(host=10) if place == "host" else Case(disk=10)
    tier = case.kept.tiers[place]
    pinned, other = case.serve(1, seconds=300), case.serve(2)
    assert case.cache.pins.given_way == 1 and not len(case.cache.pins)
    assert held(tier, pinned) == held(tier, other) == [True] * 4
    case.press()
    assert held(tier, pinned) == [True] * 4 and not any(held(tier, other))
    case.clock.now += 299
    case.press()
    assert held(tier, pinned) == [True] * 4
    case.clock.now += 1
    case.press()
    assert not any(held(tier, pinned))
    assert not tier.pinned.nbytes and not tier.pinned.book.charged and not len(tier.pinned)
    assert tier.pinned.book.given_way == 0 and tier.book.used_bytes <= tier.book.budget_bytes


def test_a_hit_renews_what_its_client_has_pinned_in_every_tier() -> None:
    case = Case(host=10, disk=30)
    names = case.serve(1, seconds=300, evict=False)
    case.clock.now += 200
    case.serve(1, client="b", evict=False)  # who has pinned nothing renews nothing
    case.clock.now += 50
    case.serve(1, evict=False)
    case.cache.evict(case.cache.evictable)
    case.clock.now += 299
    case.press()
    assert all(held(tier, names) == [True] * 4 for tier in case.kept.tiers.values())
    case.clock.now += 1
    case.press()
    assert not any(name in case.kept for name in names)


def test_a_flood_of_pins_by_one_client_takes_nothing_from_another_in_a_tier() -> None:
    """Each has its part of the tier's share at once; beyond it, its own oldest give way."""
    case = Case(host=20)
    tier = case.kept.tiers["host"]
    mine = case.serve(1, seconds=300, client="mine")
    for number in range(40):
        last = case.serve(10 + number, 5, client="flood", seconds=300)
        assert held(tier, mine) == [True] * 4
        assert tier.pinned.book.charged["flood"] <= 6 and tier.pinned.book.charged["mine"] == 4
    assert tier.pinned.book.given_way >= 39 * 4
    late = case.serve(2, 3, client="late", seconds=300)
    case.press()
    assert held(tier, mine)[:3] == held(tier, late) == [True] * 3
    assert held(tier, last)[:3] == [True] * 3, "the first pages of what it pinned last"


def test_what_exceeds_a_part_of_the_share_is_pinned_from_its_first_page_on() -> None:
    case = Case(share=1.0, host=4)
    tier = case.kept.tiers["host"]
    pinned = case.serve(1, 3, seconds=300)
    other = case.serve(2)
    assert held(tier, pinned) == [True] * 3 and held(tier, other) == [True, False, False, False]
    second = case.serve(3, client="b", seconds=300)
    assert held(tier, pinned) == [True, True, False]
    assert held(tier, second) == [True, True, False, False]
    assert tier.book.used_bytes == 4 == tier.pinned.nbytes


def test_the_states_of_a_pinned_chain_stay_with_its_pages() -> None:
    clock = Clock()
    kept = OffloadedPages(MODEL, 1, 2, host_bytes=20, pinned_share=0.5, clock=clock)
    tier, names = kept.tiers["host"], [bytes([number]) * 32 for number in range(40)]
    kept.pin([(names[0], False), (names[1], True)], "a", 60)
    kept.write_page(names[0], 0, None)
    kept.write_page(names[1], 1, 0)

    def press() -> None:
        for name in names[2:]:
            kept.write_page(name, 2, 1)

    press()
    chain = [*names[:2], state_name(names[1])]
    assert held(tier, chain) == [True] * 3 and tier.pinned.nbytes == 5
    clock.now += 59
    kept.hit(names[:2], "a")
    clock.now += 59
    press()
    assert held(tier, chain) == [True] * 3
    clock.now += 1
    press()
    assert not any(held(tier, chain))


@pytest.mark.parametrize("disk", [False, True])
def test_a_flush_ends_pins_in_every_tier(disk: bool) -> None:
    """Where the disk is spared, its pages stay as long as any."""
    case = Case(host=10, disk=10)
    names = case.serve(1, seconds=300)
    case.cache.flush()
    case.kept.flush(disk)
    assert not case.kept.pinned
    assert all(held(case.kept.tiers["disk"], names)) != disk
    assert not any(held(case.kept.tiers["host"], names))
    case.press()
    assert not any(name in case.kept for name in names)


def test_without_a_share_nothing_is_pinned() -> None:
    case = Case(share=0.0, host=10)
    names = case.serve(1, seconds=300)
    assert not case.kept.pinned
    case.press()
    assert not any(name in case.kept for name in names)
