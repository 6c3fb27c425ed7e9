"""What clients ask to be kept is kept for its time, within a share, and nobody else's is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from saccade.cache.content import Content
from saccade.cache.pins import PinTable
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.config import EmbeddingBudgets
from saccade.core.types import CacheReport, Caching, ImageKey, Request, Span
from saccade.plugins.tiers.kept_pages import CacheTierState
from saccade.plugins.tiers.page_arrivals import ReadRates
from saccade.sched.limits import SchedulerLimits
from saccade.sched.scheduler import GenerationScheduler
from tests.helpers.breadth import broad
from tests.helpers.page_tiers import arrivals_of, kept_of
from tests.sched.simulator import EOS, Simulation, picture, random_request
from tests.sched.test_scheduler import limits

PAGES, PAGE = 40, 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Unmeasured(ReadRates):
    """However quick this machine is, reads are waited for."""

    def computed(self, tokens: int, seconds: float) -> None: ...


class Pinned(Simulation):
    """A simulation whose clock stands still unless told otherwise."""

    def __init__(
        self,
        share: float = 0.5,
        pages: int = PAGES,
        settings: SchedulerLimits | None = None,
        prefix_cache: bool = True,
        **more: Any,
    ) -> None:
        settings = settings or limits()
        self.clock = Clock()
        super().__init__(settings, pages, PAGE, pinned_share=share, clock=self.clock, **more)
        assert self.scheduler.prefix is not None
        kept = self.scheduler.prefix.kept
        budgets = {tier: each.budget_bytes for tier, each in self.embeddings.tiers.items()}
        budget = budgets["device"]
        pins: PinTable[Node] = PinTable(int(share * pages), self.clock)
        images: PinTable[ImageKey] = PinTable(int(share * budget), self.clock)
        self.prefix = PrefixCache(self.pool, pins, kept=kept)
        self.embeddings = type(self.embeddings)(
            EmbeddingBudgets(budget, budgets.get("host", 0), budgets.get("disk", 0)),
            8,
            pins=images,
            file_bytes=int,
        )
        prefix = self.prefix if prefix_cache else None
        self.scheduler = GenerationScheduler(settings, self.pool, prefix, self.embeddings, (EOS,))
        if self.scheduler.loads is not None:
            arrivals_of(self.scheduler).rates = Unmeasured()

    def ask(self, request: Request, *marks: tuple[int, int], client: str = "a") -> CacheReport:
        """Run a request that sets breakpoints; what it hears of them."""
        request = replace(
            request, client=client, caching=replace(request.caching, breakpoints=marks)
        )
        self.requests[request.sampling.seed] = request
        id = self.add(request)
        self.run()
        self.check_pins()
        report = self.deltas[id][0].caching
        return report or CacheReport()

    def text(self, first: int, length: int = 20) -> Request:
        return self.request([first] + [2] * (length - 1), max_tokens=1)

    def kept(self, request: Request) -> int:
        """Tokens of the prompt that lie in the prefix cache."""
        content = Content(list(request.tokens), request.spans, request.images, request.cache_salt)
        return len(self.prefix.find(content)) * PAGE

    def press(self, rounds: int = 12) -> None:
        """Requests of another client that fill the caches many times."""
        for number in range(rounds):
            image = picture(1000 + number, 30)
            self.ask(
                self.request(
                    [5 + number % 30] + [39] * 30 + [3] * 40,
                    (Span(1, 30, 0),),
                    (image,),
                    max_tokens=1,
                ),
                client="other",
            )

    def check_pins(self) -> None:
        """The books agree with what is there."""
        self.scheduler.audit()
        pinned = [node for node in nodes(self.prefix) if node.pinned]
        assert self.prefix.pinned == len(pinned)
        assert self.prefix.pins.charged.total() == sum(len(node.pinned) for node in pinned)
        assert self.prefix.pins.charged.total() <= self.prefix.pins.share
        assert self.embeddings.pins.charged.total() <= self.embeddings.pins.share
        own = sum(self.prefix.pins.has(c, node) for node in pinned for c in node.pinned)
        assert own == len(self.prefix.pins)
        for tier in self.kept_tiers():
            book = tier.pinned.book
            assert tier.pinned.nbytes <= book.charged.total() <= book.share
            assert tier.book.used_bytes <= tier.book.budget_bytes

    def kept_tiers(self) -> list[CacheTierState]:
        """Of KV, beside the pool."""
        return list(kept_of(self.scheduler).tiers.values()) if self.scheduler.loads else []


def nodes(prefix: PrefixCache) -> list[Node]:
    found, todo = [], list(prefix._roots.values())
    while todo:
        node = todo.pop()
        todo += node.children.values()
        found.append(node)
    return found


def shown(sim: Pinned, name: int, salt: str = "", before: int = 1) -> Request:
    """Text, an image of 10 tokens, text: 20 tokens."""
    image = picture(name, 10, salt)
    tokens = [6] * before + [39] * 10 + [3] * (10 - before)
    return sim.request(tokens, (Span(before, 10, 0),), (image,), salt, max_tokens=1)


def test_a_pinned_prompt_and_its_image_outlive_pressure_until_their_time_is_over() -> None:
    sim = Pinned(embedding_tokens=40)
    kept, other = shown(sim, 1), shown(sim, 2, before=2)
    assert sim.ask(kept, (17, 300)).written == ((300, 16),)
    sim.ask(other)
    key, gone = kept.images[0].key, other.images[0].key
    sim.press()
    assert sim.kept(kept) == 16 and sim.kept(other) == 0
    assert sim.embeddings.locate(key) == "device" and sim.embeddings.locate(gone) is None
    sim.clock.now += 299
    sim.press()
    assert sim.kept(kept) == 16 and sim.embeddings.locate(key) == "device"
    sim.clock.now += 1
    sim.press()
    assert sim.kept(kept) == 0 and sim.embeddings.locate(key) is None
    assert sim.prefix.pins.given_way == sim.embeddings.pins.given_way == 0


def test_a_hit_renews_what_its_client_has_pinned() -> None:
    sim = Pinned(embedding_tokens=40)
    kept = shown(sim, 1)
    sim.ask(kept, (17, 300))
    for _ in range(3):
        sim.clock.now += 200
        assert sim.ask(shown(sim, 1)).written == ()
        sim.press(4)
    assert sim.kept(kept) == 16 and sim.embeddings.locate(kept.images[0].key) == "device"
    sim.clock.now += 200
    sim.ask(shown(sim, 1), client="b")  # of use to others too, who renew only what is theirs
    sim.clock.now += 200
    sim.press()
    assert sim.kept(kept) == 0


def test_several_places_are_kept_each_for_its_time_and_what_they_wrote_is_told_by_time() -> None:
    sim = Pinned()
    prompt = sim.text(1, 34)
    assert sim.ask(prompt, (9, 60), (16, 3600), (33, 300)).written == ((300, 16), (3600, 16))
    assert sim.ask(prompt, (9, 60), (16, 3600), (33, 300)).written == ()
    longer = sim.request([*prompt.tokens, *[3] * 10], max_tokens=1)
    assert sim.ask(longer, (42, 300)).written == ((300, 8),)
    sim.clock.now += 301
    sim.press()
    assert sim.kept(prompt) == 16
    sim.clock.now += 3300
    sim.press()
    assert sim.kept(prompt) == 0


def test_pins_take_no_more_than_their_share_and_the_oldest_gives_way() -> None:
    sim = Pinned(share=0.5)
    prompts = [sim.text(first) for first in range(1, 7)]  # 5 pages each, of 20
    for prompt in prompts:
        assert sim.ask(prompt, (20, 300)).written in (((300, 20),), ((300, 16),))
    assert sim.prefix.pins.given_way >= 1
    sim.press()
    assert sim.kept(prompts[0]) == 0 and all(sim.kept(each) == 16 for each in prompts[-4:])
    long = sim.text(20, 120)  # 30 pages: more than the share
    assert sim.ask(long, (120, 300)).written == ((300, 80),)
    sim.press()
    assert sim.kept(long) == 80


def test_a_flood_of_pins_by_one_client_takes_nothing_from_another() -> None:
    sim = Pinned(share=0.5, embedding_tokens=80)
    mine = [shown(sim, 1), shown(sim, 2, before=2)]  # 10 pages and 20 rows: its half of each share
    for request in mine:
        sim.ask(request, (20, 300), client="mine")
    lost = 0
    for number in range(40):
        sim.ask(shown(sim, 100 + number, before=3), (20, 300), client="flood")
        lost += sum(sim.kept(request) != 16 for request in mine)
        lost += sum(sim.embeddings.locate(r.images[0].key) != "device" for r in mine)
        assert sim.prefix.pins.charged["flood"] <= 10
    assert lost == 0 and sim.prefix.pins.given_way >= 37
    late = shown(sim, 500, before=4)
    sim.ask(late, (20, 300), client="late")  # whoever comes has its part at once
    sim.press()
    assert sim.kept(late) == 16


def test_what_is_pinned_keeps_no_request_from_going_on() -> None:
    sim = Pinned(share=1.0, pages=20, embedding_tokens=20)
    kept = shown(sim, 1)
    sim.ask(kept, (20, 300))
    sim.ask(sim.text(7, 70), client="b")
    assert sim.prefix.pins.given_way == 1 and sim.kept(kept) < 16
    sim.ask(sim.request([1, *[39] * 20], (Span(1, 20, 0),), (picture(9, 20),), max_tokens=1))
    assert sim.embeddings.locate(kept.images[0].key) is None


def test_a_flush_ends_pins_too() -> None:
    sim = Pinned()
    kept = shown(sim, 1)
    sim.ask(kept, (20, 300))
    sim.flush(embeddings=True)
    sim.check_pins()
    assert sim.kept(kept) == 0 and not len(sim.prefix.pins) and not len(sim.embeddings.pins)
    assert sim.embeddings.locate(kept.images[0].key) is None


def test_nothing_is_pinned_for_a_place_that_the_prompt_has_not_reached() -> None:
    sim = Pinned(settings=limits(chunk_tokens=8))
    request = replace(sim.text(1, 30), caching=Caching(((16, 300), (28, 300))))
    sim.requests[request.sampling.seed] = request
    sim.add(request)
    for reached, pinned in ((8, 0), (16, 4), (24, 4)):
        sim.finish(sim.plan())
        assert sim.scheduler.running[0].computed == reached and sim.prefix.pinned == pinned
    sim.abort(request.id)
    sim.run()
    sim.check_pins()
    assert sim.prefix.pinned == 4 and sim.kept(request) >= 16


@pytest.mark.more
@pytest.mark.parametrize("tiers", [False, True], ids=["", "tiers"])
@pytest.mark.parametrize("seed", broad([*range(6), 117], keep=[0, 1, 2, 117]))
def test_pages_add_up_whatever_is_pinned_aborted_and_preempted(seed: int, tiers: bool) -> None:
    rng = random.Random(seed)
    sim = Pinned(
        rng.choice([0.1, 0.5, 1.0]),
        rng.choice([24, 40, 80]),
        limits(max_running=4, chunk_tokens=rng.choice([8, 16, 64]), early_tokens=8),
        embedding_tokens=rng.choice([40, 100]),
        host_tokens=rng.choice([0, 60]),
        disk_tokens=rng.choice([0, 200]),
        in_flight=rng.choice([1, 2]),
        kept_pages=30 * tiers,
        host_pages=20 * tiers,
    )
    for _ in range(60):
        request = random_request(sim, rng, 80, 6)
        places = sorted(rng.sample(range(1, len(request.tokens) + 1), min(2, len(request.tokens))))
        marks = tuple((place, rng.choice([5, 60])) for place in places)
        request = replace(request, caching=Caching(marks if rng.random() < 0.7 else (), True))
        sim.requests[request.sampling.seed] = request
        sim.add(request)
        for _ in range(rng.randrange(3)):
            while len(sim.flights) < sim.in_flight and not sim.plan().empty:
                pass
            if sim.flights:
                sim.finish(sim.flights[0][0])
            for key in list(sim.wanted):
                if rng.random() < 0.7:
                    sim.send_pixels(key)
        if rng.random() < 0.2 and sim.alive:
            sim.abort(rng.choice(list(sim.alive)))
        if rng.random() < 0.03:
            sim.flush(embeddings=rng.random() < 0.5)
        sim.clock.now += rng.choice([0, 1, 10])
        sim.check_pins()
    sim.run()
    sim.check_pins()
    sim.clock.now += 100
    sim.prefix.end_pins()
    sim.embeddings.end_pins()
    assert not len(sim.prefix.pins) and not sim.prefix.pinned
    assert not sim.embeddings.kept_bytes and not sim.embeddings.pins.charged
    for tier in sim.kept_tiers():
        assert tier.counts["saved"]
        tier.pinned.end_due()
        assert not len(tier.pinned) and not tier.pinned.book.charged
    sim.check_end()
