"""Videos in the engine: answers about given frames are transformers', token for token, and a pair
of frames costs its work once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from saccade.core.types import ImageKey, Request
from tests.families.every import EVERY
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.videos import NEW_TOKENS, VideoModel, load


@pytest.fixture(scope="module", params=EVERY)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoModel:
    set_threads()
    model = load(request.param, tmp_path_factory.mktemp(request.param))
    if model.net.spec.video is None:
        pytest.skip(f"{request.param} takes no videos")
    return model


def run(harness: Harness, request: Request) -> Outcome:
    return harness.run([request])[request.id]


def same(outcome: Outcome, wanted: Sequence[int]) -> bool:
    """Whether an answer is the reference's, as far as that goes."""
    assert len(wanted) > 2
    return outcome.error is None and outcome.tokens[: len(wanted)] == wanted


CLIP = (1, 2, 3, 4, 5, 5, 6)
"""Three pairs that differ, of which the last repeats its frame; and one of a frame twice."""


@pytest.mark.first
@pytest.mark.parametrize("chunk_tokens", [13, 2048])
def test_answers_about_given_frames_are_transformers(model: VideoModel, chunk_tokens: int) -> None:
    harness = Harness(model.net, chunk_tokens=chunk_tokens, page_size=4)
    request = model.ask(harness, "video", CLIP)
    wanted = model.answer(request, CLIP)
    assert same(run(harness, request), wanted)
    decoded, encoded = len(harness.decoded), len(harness.encoded)
    again = run(harness, model.ask(harness, "again", CLIP))
    assert same(again, wanted)
    assert (len(harness.decoded), len(harness.encoded)) == (decoded, encoded), "a seen video"


@pytest.mark.first
@pytest.mark.once("model")
@pytest.mark.parametrize("chunk_tokens", [13, 2048])
def test_preempted_answers_about_videos_are_transformers(
    model: VideoModel, chunk_tokens: int
) -> None:
    clips = {"a": CLIP, "b": (7, 8, 9, 10, 11, 11, 12), "c": (13, 14, 15, 16)}
    calm = Harness(model.net)
    asked = {name: model.ask(calm, name, clip) for name, clip in clips.items()}
    longer = replace(asked["a"].sampling, max_tokens=3 * NEW_TOKENS)
    asked = {name: replace(each, sampling=longer) for name, each in asked.items()}
    pages = len(asked["a"].tokens) + NEW_TOKENS // 2  # for two prompts, and some of two answers
    harness = Harness(model.net, chunk_tokens=chunk_tokens, page_size=2, kv_pages=pages)
    harness.pixels, harness.pixel_names = calm.pixels, calm.pixel_names
    found = harness.run(list(asked.values()))
    for name, clip in clips.items():
        assert same(found[name], model.answer(asked[name], clip)), name
        assert found[name].tokens == run(calm, asked[name]).tokens
    assert harness.scheduler.counts.preemptions > 0
    assert len(harness.encoded) == len(set(harness.encoded)), "no pair is encoded twice"


@pytest.mark.once("model")
def test_a_video_that_grows_costs_its_new_frames(model: VideoModel) -> None:
    harness = Harness(model.net, page_size=4)
    grown = (*CLIP[:6], 7, 8, 9, 10)
    run(harness, model.ask(harness, "first", CLIP[:6]))
    before = len(harness.encoded)
    request = model.ask(harness, "grown", grown)
    assert same(run(harness, request), model.answer(request, grown))
    assert len(harness.encoded) - before == 4 // model.rules.frames


@pytest.mark.once("model")
def test_frames_at_another_pace_are_not_answered_from_the_cache(model: VideoModel) -> None:
    """Qwen2.5-VL tells time by positions alone: equal tokens and frames are another prompt."""
    harness, clip = Harness(model.net, page_size=4), (1, 2, 3, 4, 5, 6, 7, 8)
    run(harness, model.ask(harness, "fast", clip, fps=8.0))
    slow = model.ask(harness, "slow", clip, fps=0.5)
    before = len(harness.encoded)
    assert same(run(harness, slow), model.answer(slow, clip, fps=0.5))
    assert len(harness.encoded) == before, "the frames are known"


@pytest.mark.first
def test_a_frame_twice_is_the_still_image(model: VideoModel) -> None:
    harness = Harness(model.net)
    first = model.ask(harness, "video", (5, 5))
    still = ImageKey(b"[5]".ljust(32, b"\0"), bytes(16))
    assert {image.key for image in first.images} == {still}
    assert all(image.canvas == model.pixels(5).shape[:2] for image in first.images)
    request = harness.request(
        "still", model.tokenizer.encode(f"a {model.reference.placeholder} b").ids, first.images[:1]
    )
    run(harness, request)
    run(harness, first)
    assert harness.encoded == [still]


def test_the_same_pixels_under_other_names_are_encoded_once(model: VideoModel) -> None:
    """A second upload of a clip: in turn, beside the first, and when its embedding has gone."""
    harness = Harness(model.net, page_size=4)
    wanted = model.answer(model.ask(harness, "first", CLIP), CLIP)
    both = [model.ask(harness, "first", CLIP), model.ask(harness, "second", CLIP, upload="b")]
    for outcome in harness.run(both).values():
        assert same(outcome, wanted)
    images = len({image.key for image in both[0].images})
    assert (len(harness.decoded), len(harness.encoded)) == (2 * images, images)
    assert harness.scheduler.counts.images_same == images
    assert same(run(harness, model.ask(harness, "third", CLIP, upload="c")), wanted)
    assert len(harness.encoded) == images
    harness.scheduler.flush(embeddings=True)
    again = run(harness, model.ask(harness, "again", CLIP, upload="b"))
    assert same(again, wanted)
    assert len(harness.encoded) == 2 * images
    assert same(run(harness, model.ask(harness, "first again", CLIP)), wanted)
    assert len(harness.encoded) == 2 * images, "the other upload's embeddings serve this one"


def test_an_embedding_that_goes_before_it_is_shown_is_made_under_the_images_own_name(
    model: VideoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(model.net, page_size=4)
    first = model.ask(harness, "first", CLIP)
    run(harness, first)
    answer, scheduler = harness._answer_notices, harness.scheduler
    flushed: list[int] = []

    def answer_and_flush() -> None:
        answer()
        if scheduler.counts.images_same and not flushed:
            flushed.append(len(harness.decoded))
            scheduler.flush(embeddings=True)

    monkeypatch.setattr(harness, "_answer_notices", answer_and_flush)
    second = model.ask(harness, "second", CLIP, upload="b")
    before = len(harness.encoded)
    assert same(run(harness, second), model.answer(second, CLIP))
    assert flushed
    assert set(harness.encoded[before:]) == {image.key for image in second.images}


def test_pixels_of_another_tenant_are_others(model: VideoModel) -> None:
    harness = Harness(model.net)
    request = model.ask(harness, "first", CLIP[:2])
    run(harness, request)
    images = tuple(replace(each, key=replace(each.key, salt="b")) for each in request.images)
    for image, own in zip(images, request.images, strict=True):
        harness.pixels[image.key] = harness.pixels[own.key]
        harness.pixel_names[image.key] = harness.pixel_names[own.key]
    run(harness, replace(request, id="other", images=images, cache_salt="b"))
    assert len(harness.encoded) == 2 * len(images)
