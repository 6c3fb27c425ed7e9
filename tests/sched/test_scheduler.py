from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from saccade.core.plan import Plan, StepResult
from saccade.core.types import Image, ImageKey, ImageOutcome, Request, Span
from saccade.sched.limits import SchedulerLimits
from tests.sched.simulator import PLACEHOLDER, Simulation, picture

IMAGE = 3 * 80 * 16 * 16
"""Bytes of the pixels of an image of 20 tokens: whole pages of memory."""
IN_FLIGHT = {"plans": 1}


@pytest.fixture(autouse=True, params=[1, 2])
def in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim holds with one plan in flight and with two (`Simulation.run`)."""
    monkeypatch.setitem(IN_FLIGHT, "plans", request.param)


ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 10}


def limits(
    max_running: int = 8,
    chunk_tokens: int = 512,
    context_length: int = 1000,
    encode_patches: int = 10_000,
    look_ahead: int = 32,
    early_tokens: int = 256,
    arena_bytes: int = 1 << 40,
) -> SchedulerLimits:
    return SchedulerLimits(
        max_running,
        chunk_tokens,
        context_length,
        encode_patches,
        look_ahead,
        early_tokens,
        arena_bytes,
    )


def simulation(
    settings: SchedulerLimits | None = None, pages: int = 256, page_size: int = 4, **more: object
) -> Simulation:
    more = {"in_flight": IN_FLIGHT["plans"], **more}
    return Simulation(settings or limits(), pages, page_size, **more)  # type: ignore[arg-type]


def add_text(sim: Simulation, length: int, first: int = 1, **sampling: Any) -> str:
    return sim.add(sim.request([first] + [2] * (length - 1), **(ENDLESS | sampling)))


def image_request(
    sim: Simulation, *images: Image, before: int = 5, tail: int = 5, **sampling: Any
) -> Request:
    """Text, then the pictures with a token between them, then text."""
    tokens, spans = [1] * before, []
    for i, image in enumerate(images):
        spans.append(Span(len(tokens), image.num_tokens, i))
        tokens += [PLACEHOLDER] * image.num_tokens + [4]
    return sim.request(tokens + [3] * tail, tuple(spans), images, **(ENDLESS | sampling))


def steps(sim: Simulation) -> Iterator[Plan]:
    """Plans until there is nothing to do; pixels are not sent."""
    while True:
        plan = sim.plan()
        if plan.empty:
            return
        yield plan
        sim.finish(plan)


# ---- chunks, order and pages


def test_a_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    sim = simulation(limits(chunk_tokens=16))
    add_text(sim, 40, max_tokens=3)
    shapes = [[(row.start, row.length, row.sample) for row in plan.rows] for plan in steps(sim)]
    assert shapes == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
        [(40, 1, True)],
        [(41, 1, True)],
        [],
    ]


def test_rows_that_decode_come_first_and_leave_less_for_prompts() -> None:
    sim = simulation(limits(chunk_tokens=16))
    add_text(sim, 8)
    sim.finish(sim.plan())
    add_text(sim, 40, first=5)
    plan = sim.plan()
    assert [(row.slot, row.length) for row in plan.rows] == [(0, 1), (1, 15)]
    sim.finish(plan)
    sim.run()


def test_slots_are_given_first_come_first_served() -> None:
    sim = simulation(limits(max_running=2))
    ids = [add_text(sim, 8, first=n) for n in range(1, 5)]
    order = []
    for plan in steps(sim):
        order += [sim.worker.requests[entry.sampling.seed].id for entry in plan.open]
        assert len(sim.scheduler.running) <= 2
    assert order == ids


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    sim = simulation(pages=16, prefix=False)
    add_text(sim, 20)
    sim.finish(sim.plan())
    large, small = add_text(sim, 40, max_tokens=5), add_text(sim, 4, max_tokens=5)
    sim.finish(sim.plan())
    assert [s.request.id for s in sim.scheduler.waiting] == [large, small]
    sim.run()
    assert sim.scheduler.counts.preemptions == 0


def test_cached_pages_that_are_matched_do_not_count_as_room() -> None:
    sim = simulation(pages=16)
    add_text(sim, 33, max_tokens=1)
    sim.run()
    assert sim.scheduler.prefix is not None and sim.scheduler.prefix.evictable == 8
    add_text(sim, 4, first=7, max_tokens=17)
    sim.finish(sim.plan())
    again = add_text(
        sim, 53, max_tokens=1
    )  # 8 of its 14 pages are cached; 8 are free, of which 5 are promised
    sim.finish(sim.plan())
    assert [s.request.id for s in sim.scheduler.waiting] == [again]
    sim.run()


def test_when_pages_run_out_the_youngest_is_computed_again() -> None:
    sim = simulation(pages=18, prefix=False)
    old, young = add_text(sim, 8, max_tokens=60), add_text(sim, 8, first=3, max_tokens=60)
    sim.run()
    assert sim.scheduler.counts.preemptions >= 1
    ends = [delta.id for deltas in sim.deltas.values() for delta in deltas if delta.finish]
    assert ends == [old, young]
    assert [len(sim.output(id)) for id in (old, young)] == [60, 60]


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    plenty, scarce = simulation(), simulation(pages=18)
    for sim in (plenty, scarce):
        for first in (1, 3, 5):
            add_text(sim, 8, first=first, max_tokens=50)
        sim.run()
    assert scarce.scheduler.counts.preemptions > plenty.scheduler.counts.preemptions == 0
    assert [scarce.output(id) for id in scarce.deltas] == [
        plenty.output(id) for id in plenty.deltas
    ]
    assert [deltas[0].cached_tokens for deltas in scarce.deltas.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("length", "what"),
    [(0, "no tokens"), (100, "context length allows 100"), (500, "context length allows 100")],
)
def test_a_request_that_can_never_fit_is_refused_at_once(length: int, what: str) -> None:
    sim = simulation(limits(context_length=100))
    (delta,) = sim.scheduler.add_request(sim.request([1] * length))
    assert delta.finish == "error" and what in str(delta.error)
    assert sim.scheduler.idle


def test_the_kv_cache_bounds_a_request_too() -> None:
    sim = simulation(pages=5)
    (delta,) = sim.scheduler.add_request(sim.request([1] * 20))
    assert "the KV cache allows 20" in str(delta.error)
    fits = add_text(sim, 19)
    sim.run()
    assert len(sim.output(fits)) == 1 and sim.deltas[fits][-1].finish == "length"


# ---- answers


def test_every_token_is_news_at_once_and_the_first_tells_what_was_cached() -> None:
    sim = simulation()
    for _ in range(2):
        add_text(sim, 30, max_tokens=3)
        sim.run()
    first, second = sim.deltas.values()
    assert [len(delta.tokens) for delta in first] == [1, 1, 1]
    assert [delta.cached_tokens for delta in first] == [0, 0, 0]
    assert [delta.cached_tokens for delta in second] == [28, 0, 0]
    assert [len(delta.logprobs) for delta in second] == [1, 1, 1]


# ---- aborts and failures


@pytest.mark.parametrize("tokens", [1, 2, 17, 18, 40])
def test_an_answer_that_nobody_reads_along_is_told_in_bundles(tokens: int) -> None:
    """The first token goes alone, for it is timed. The end brings what is left."""
    sim = simulation()
    settings: dict[str, Any] = ENDLESS | {"max_tokens": tokens}
    streamed = sim.request([1, 2, 3], **settings)
    bundled = replace(streamed, id="bundled", streamed=False)
    sim.add(streamed)
    sim.run()
    sim.add(bundled)
    sim.run()
    news = [len(delta.tokens) for delta in sim.deltas["bundled"]]
    left = [16] * ((tokens - 1) // 16) + [(tokens - 1) % 16]
    assert news == [1, *filter(None, left)] and len(sim.deltas[streamed.id]) == tokens
    assert sim.output("bundled") == sim.output(streamed.id)
    assert sim.deltas["bundled"][-1].finish == "length"


def test_an_abort_and_a_preemption_lose_no_token_of_a_bundle() -> None:
    sim = simulation(pages=16)
    first = add_text(sim, 20, max_tokens=20)
    second = sim.add(
        replace(sim.request([3] * 20, **(ENDLESS | {"max_tokens": 20})), streamed=False)
    )
    sim.run()
    assert sim.scheduler.counts.preemptions > 0
    assert len(sim.output(first)) == len(sim.output(second)) == 20
    third = sim.add(replace(sim.request([4] * 9, **ENDLESS), streamed=False))
    for _ in range(4):
        sim.plan()
        sim.finish(sim.flights[0][0])
    sim.abort(third)
    sim.run()
    assert sim.deltas[third][-1].finish == "abort" and len(sim.output(third)) > 1


@pytest.mark.parametrize("when", ["waiting", "planned", "running"])
def test_an_aborted_request_ends_once_and_frees_everything(when: str) -> None:
    sim = simulation()
    id = add_text(sim, 30)
    plan = None
    if when != "waiting":
        plan = sim.plan()
        if when == "running":
            sim.finish(plan)
            plan = None
    sim.abort(id)
    assert sim.scheduler.abort(id) == []
    if plan is not None:
        sim.finish(plan)
    sim.run()
    assert [delta.finish for delta in sim.deltas[id]][-1] == "abort"
    sim.check_end()


def test_fail_all_ends_every_request_with_the_error() -> None:
    sim = simulation(limits(max_running=1))
    ids = [add_text(sim, 8), add_text(sim, 8)]
    sim.finish(sim.plan())
    sim.take(sim.scheduler.fail_all("the engine is stopping"))
    assert [sim.deltas[id][-1].error for id in ids] == ["the engine is stopping"] * 2
    sim.run()
    sim.check_end()


# ---- pictures


@pytest.mark.parametrize("prefix", [True, False])
def test_sixteen_requests_with_one_new_picture_ask_and_encode_once(prefix: bool) -> None:
    sim = simulation(limits(max_running=16), pages=400, prefix=prefix)
    image = picture(1, 50)
    ids = [sim.add(image_request(sim, image, tail=n + 1)) for n in range(16)]
    sim.run()
    assert sim.asked == sim.worker.encoded == {image.key: 1}
    levels = [outcome.level for id in ids for outcome in sim.deltas[id][0].images]
    assert len(levels) == 16 and levels.count("none") == 1


def test_twins_of_a_long_prompt_wait_for_the_first_and_share_its_pages() -> None:
    sim = simulation(limits(max_running=16), pages=300)
    ids = [sim.add(image_request(sim, picture(1, 300), before=4, tail=n + 1)) for n in range(16)]
    sim.run()
    assert [sim.deltas[id][0].cached_tokens for id in ids] == [0] + [304] * 15
    assert [sim.deltas[id][0].images for id in ids[1:]] == [(ImageOutcome(0, "kv"),)] * 15


def test_text_is_not_held_up_by_a_picture_that_has_not_arrived() -> None:
    sim = simulation(limits(max_running=2))
    slow = [sim.add(image_request(sim, picture(n, 20))) for n in range(3)]
    text = add_text(sim, 8, first=9)
    for _ in steps(sim):
        pass
    assert sim.deltas[text][-1].finish == "length"
    assert sim.alive.keys() == set(slow)
    sim.run()


def test_earlier_chunks_go_on_while_a_later_picture_is_missing() -> None:
    sim = simulation(limits(early_tokens=8))
    first, second = picture(1, 20), picture(2, 20)
    sim.add(image_request(sim, first, second))
    assert sim.plan().empty and set(sim.wanted) == {first.key, second.key}
    sim.send_pixels(first.key)
    plans = list(steps(sim))
    assert [[(row.start, row.length) for row in plan.rows] for plan in plans] == [[], [(0, 26)]]
    assert [[encode.key for encode in plan.encode] for plan in plans] == [[first.key], []]
    sim.run()


@pytest.mark.parametrize(
    ("patches", "by_step"), [(80, [[1], [2], [3]]), (160, [[1, 2], [3]]), (1000, [[1, 2], [3]])]
)
def test_an_image_is_encoded_for_its_chunk_or_the_one_before_and_only_once(
    patches: int, by_step: list[list[int]]
) -> None:
    sim = simulation(limits(chunk_tokens=16, encode_patches=patches))
    images = [picture(n, 20) for n in (1, 2, 3)]  # 80 patches each
    sim.add(image_request(sim, *images))
    for image in images:
        sim.send_pixels(image.key)
    encoded = [[encode.key for encode in plan.encode] for plan in steps(sim) if plan.encode]
    assert encoded == [[images[n - 1].key for n in step] for step in by_step]


def test_64_large_pictures_in_one_request_keep_to_the_budgets_of_patches_and_pixels() -> None:
    images = [
        picture(n, 60 * 34) for n in range(64)
    ]  # as 1920 x 1080 in Qwen3-VL: 8160 patches each
    pixels = 3 * images[0].num_patches * 16 * 16
    sim = simulation(
        limits(
            chunk_tokens=4096,
            context_length=140_000,
            encode_patches=16_384,
            arena_bytes=4 * pixels,
        ),
        pages=8750,
        page_size=16,
    )
    scheduler = sim.scheduler
    scheduler.add_request(image_request(sim, *images, max_tokens=1))
    wanted: list[ImageKey] = []
    encoded: list[int] = []
    for _ in range(1000):
        plan = scheduler.plan()
        assert scheduler.image_scheduler.slots.bytes_in_use <= 4 * pixels
        if not plan.empty:
            encoded.append(len(plan.encode))
            tokens = tuple(1 for row in plan.rows if row.sample)
            done = tuple((encode.key, 1.0, 0.0) for encode in plan.encode)
            scheduler.apply(StepResult(plan.step, tokens, encoded=done))
        wanted += (key for key, _ in scheduler.take_notices().want)
        while wanted:
            assert scheduler.pixels_ready(wanted.pop(0)) == []
    assert scheduler.idle and scheduler.image_scheduler.slots.bytes_in_use == 0
    assert max(encoded) == 2 and sum(encoded) == 64, "16384 patches are two pictures"


def test_what_is_encoded_ahead_stays_within_the_budget_of_the_device() -> None:
    sim = simulation(limits(chunk_tokens=16), embedding_tokens=20)
    images = [picture(n, 20) for n in (1, 2)]
    sim.add(image_request(sim, *images))
    for image in images:
        sim.send_pixels(image.key)
    encoded = [encode.key for plan in steps(sim) for encode in plan.encode]
    assert encoded == [images[0].key, images[1].key]
    assert (sim.embeddings.device.evictions, sim.embeddings.excesses) == (1, 0)


def test_a_picture_comes_back_from_the_host() -> None:
    sim = simulation(prefix=False, embedding_tokens=20, host_tokens=20)
    for n in (1, 2, 1, 2):
        sim.add(image_request(sim, picture(n, 20)))
        sim.run()
    assert sim.worker.encoded == {picture(1, 20).key: 1, picture(2, 20).key: 1}
    assert sim.asked == sim.worker.encoded
    assert [deltas[0].images[0].level for deltas in sim.deltas.values()] == [
        "none",
        "none",
        "embedding",
        "embedding",
    ]
    assert (sim.embeddings.hits, sim.embeddings.misses) == ({"host": 2}, {"device": 4, "host": 2})


def test_a_picture_comes_back_from_the_disk_and_a_damaged_file_costs_only_encoding() -> None:
    sim = simulation(prefix=False, embedding_tokens=20, disk_tokens=60)
    for harm, n in ((0, 1), (0, 2), (0, 1), (1, 2), (0, 2)):
        sim.worker.harm = harm
        sim.add(image_request(sim, picture(n, 20)))
        sim.run()
    assert sim.worker.encoded == {picture(1, 20).key: 1, picture(2, 20).key: 2}
    assert sim.embeddings.hits == {"disk": 1, "device": 1}


def test_while_a_picture_is_read_from_disk_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = simulation(prefix=False, embedding_tokens=20, disk_tokens=60)
    for n in (1, 2):
        sim.add(image_request(sim, picture(n, 20)))
        sim.run()
    monkeypatch.setattr(sim.worker.rng, "random", lambda: 0.9)  # no read ends by itself
    reader = sim.add(image_request(sim, picture(1, 20)))
    writer = sim.add(sim.request([1, 2, 3], max_tokens=5, ignore_eos=True))
    plans = list(steps(sim))
    assert [
        move.target for plan in plans for move in plan.moves if move.source in ("disk", "staged")
    ] == ["staged", "device"]
    assert [plan.wait for plan in plans].index(True) == 6, (
        "waits only when there is nothing else to do"
    )
    assert len(sim.output(writer)) == 5 and sim.deltas[reader][0].images[0].level == "embedding"


def test_a_step_encodes_within_its_budget_and_a_large_picture_alone() -> None:
    sim = simulation(limits(encode_patches=100))
    images = [picture(n, 20) for n in (1, 2)] + [picture(3, 200)]  # 80, 80 and 800 patches
    sim.add(image_request(sim, *images))
    for image in images:
        sim.send_pixels(image.key)
    encoded = [[encode.key for encode in plan.encode] for plan in steps(sim)]
    assert encoded[:3] == [[image.key] for image in images]


def test_a_seen_picture_is_not_asked_for_again() -> None:
    sim = simulation(prefix=False)
    image = picture(1, 20)
    for _ in range(3):
        sim.add(image_request(sim, image))
        sim.run()
    assert sim.asked == sim.worker.encoded == {image.key: 1}
    assert [deltas[0].images[0].level for deltas in sim.deltas.values()] == [
        "none",
        "embedding",
        "embedding",
    ]


def test_a_picture_in_the_cached_prefix_needs_neither_pixels_nor_embedding() -> None:
    sim = simulation(embedding_tokens=20)
    sim.add(image_request(sim, picture(1, 20), tail=10))
    sim.run()
    sim.add(image_request(sim, picture(2, 20), tail=10))
    sim.run()
    assert sim.embeddings.locate(picture(1, 20).key) is None
    again = sim.add(image_request(sim, picture(1, 20), tail=11))
    sim.run()
    assert sim.deltas[again][0].images == (ImageOutcome(0, "kv"),)
    assert sim.asked == {picture(1, 20).key: 1, picture(2, 20).key: 1}


def test_pixels_that_nobody_needs_are_kept_until_room_is_needed() -> None:
    sim = simulation(prefix=False)
    image = picture(1, 20)
    first = sim.add(image_request(sim, image))
    sim.send_pixels(image.key)
    slots = sim.scheduler.image_scheduler.slots
    assert slots.bytes_in_use == 3 * 80 * 16 * 16
    sim.abort(first)
    assert slots.bytes_in_use == 0
    second = sim.add(image_request(sim, image))
    sim.run()
    assert sim.asked == {image.key: 1}
    assert [outcome.level for outcome in sim.deltas[second][0].images] == ["pixels"]
    assert sim.scheduler.counts.images_pixels == 1


def test_a_failed_picture_ends_exactly_the_requests_that_need_it() -> None:
    sim = simulation()
    bad, good = picture(1, 20), picture(2, 20)
    ids = [sim.add(image_request(sim, *images)) for images in ([bad], [good, bad], [good])]
    assert sim.plan().empty
    sim.fail_pixels(bad.key)
    sim.run()
    assert [sim.deltas[id][-1].finish for id in ids] == ["error", "error", "length"]
    assert sim.deltas[ids[0]][-1].error == "cannot be decoded"
    later = sim.add(image_request(sim, bad))
    sim.run()
    assert sim.deltas[later][-1].finish == "length", "a failure is not remembered"


def test_a_picture_larger_than_the_embedding_budget_is_served() -> None:
    sim = simulation(limits(chunk_tokens=16), embedding_tokens=10, prefix=False)
    ids = [sim.add(image_request(sim, picture(n, 50), picture(n + 5, 50))) for n in (1, 2)]
    sim.run()
    assert [sim.deltas[id][-1].finish for id in ids] == ["length", "length"]
    assert sim.worker.encoded.total() == 4


def test_pixels_that_came_too_early_make_room_for_the_image_that_is_needed_first() -> None:
    """The arena and the device hold one image each. While the first is shown, the second request's
    arrives, and cannot be encoded; then the first request needs its own next.
    """
    sim = simulation(
        limits(max_running=1, chunk_tokens=24, arena_bytes=IMAGE), prefix=False, embedding_tokens=20
    )
    seen, early = picture(1, 20), picture(9, 20)
    sim.add(image_request(sim, seen))
    sim.run()
    first = sim.add(image_request(sim, picture(2, 20), seen))
    second = sim.add(image_request(sim, early))
    sim.run()
    assert [sim.deltas[id][-1].finish for id in (first, second)] == ["length", "length"]
    assert sim.worker.encoded.total() == 4 and sim.asked[early.key] <= 2


def test_no_more_pixels_are_asked_for_than_the_arena_holds() -> None:
    sim = simulation(limits(arena_bytes=2 * IMAGE))
    ids = [
        sim.add(image_request(sim, *(picture(10 * n + i, 20) for i in range(3)))) for n in range(4)
    ]
    sim.plan()
    assert len(sim.wanted) == 2
    sim.run()
    assert [sim.deltas[id][-1].finish for id in ids] == ["length"] * 4
    assert sim.asked.total() == 12, "none was given back unused"


def test_an_image_larger_than_the_arena_is_refused_at_once() -> None:
    sim = simulation(limits(arena_bytes=IMAGE - 1))
    id = sim.add(image_request(sim, picture(1, 21)))
    assert "--tune arena_mb" in str(sim.deltas[id][-1].error) and sim.scheduler.idle


def test_a_decode_without_a_page_steps_back_for_an_older_prompt() -> None:
    sim = simulation(limits(chunk_tokens=1), pages=22, page_size=1, prefix=False)
    old = sim.add(image_request(sim, picture(1, 1), before=9, tail=1))
    young = add_text(sim, 9, first=9, max_tokens=12)
    sim.run()
    assert [sim.deltas[id][-1].finish for id in (old, young)] == ["length", "length"]


def test_pictures_beyond_the_embedding_budget_take_turns() -> None:
    sim = simulation(embedding_tokens=100, prefix=False)
    images = [picture(n, 50) for n in range(1, 7)]
    sim.add(image_request(sim, *images))
    for image in images:
        sim.send_pixels(image.key)
    encoded = [len(plan.encode) for plan in steps(sim) if plan.encode]
    assert encoded == [2, 2, 2]
    assert sim.worker.encoded.total() == 6


def test_a_pinned_picture_outlives_its_first_span() -> None:
    sim = simulation(limits(chunk_tokens=16), embedding_tokens=30, prefix=False)
    split, between = picture(1, 30), picture(2, 30)
    spans = (Span(0, 15, 0), Span(20, 30, 1), Span(60, 15, 0, 15))
    tokens = [PLACEHOLDER if any(s.start <= i < s.end for s in spans) else 1 for i in range(80)]
    sim.add(sim.request(tokens, spans, (split, between), **ENDLESS))
    sim.run()
    assert sim.worker.encoded == {split.key: 1, between.key: 1}


def test_look_ahead_is_bounded_and_in_queue_order() -> None:
    sim = simulation(limits(max_running=1, look_ahead=3))
    add_text(sim, 4, max_tokens=30)
    sim.finish(sim.plan())
    images = [picture(n, 10) for n in range(6)]
    for image in images:
        sim.add(image_request(sim, image))
    sim.finish(sim.plan())
    assert list(sim.wanted) == [image.key for image in images[:3]]
    sim.run()
    assert sim.asked == {image.key: 1 for image in images}


def test_preemption_in_the_middle_of_a_picture_does_not_encode_it_again() -> None:
    sim = simulation(limits(chunk_tokens=8), pages=30, prefix=False)
    add_text(sim, 8, max_tokens=100)
    image = picture(1, 60)
    sim.add(image_request(sim, image, max_tokens=30))
    sim.send_pixels(image.key)
    sim.run()
    assert sim.scheduler.counts.preemptions >= 1
    assert sim.worker.encoded == {image.key: 1}


def test_the_same_answer_comes_with_every_cache_on_or_off() -> None:
    answers = set()
    for prefix in (True, False):
        for chunk_tokens in (1, 13, 512):
            sim = simulation(limits(chunk_tokens=chunk_tokens), prefix=prefix)
            ids = [sim.add(image_request(sim, picture(1, 20), picture(n, 20))) for n in (1, 2, 1)]
            sim.run()
            answers.add(tuple(tuple(sim.output(id)) for id in ids))
    (answer,) = answers
    assert answer[0] == answer[2] != answer[1]
