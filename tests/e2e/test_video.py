"""Videos through the real server: answers are transformers' on the same frames, and what was seen
is neither decoded nor encoded again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import PIL.Image
import pytest
from tokenizers import Tokenizer

from saccade.core.types import Request
from saccade.core.video import FrameTimes, VideoOptions, images_of
from saccade.families.registry import load_spec
from saccade_bench.fixtures.server import Server, routing, serving
from tests.e2e.test_serve import PAGE, ask
from tests.e2e.ways import KEY
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import picture
from tests.helpers.images import data_url, image_part, png_url, text_part, user
from tests.media.clips import clip as clip_file
from tests.videos import VideoModel, load

pytestmark = pytest.mark.more

COMMON = ("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192")


def clip(model: VideoModel, seeds: Sequence[int], **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": [png_url(model.pixels(seed)) for seed in seeds], **options}


def decoded_and_encoded(server: Server) -> tuple[float, float]:
    return (
        server.metric("saccade_images_decoded_total"),
        server.metric("saccade_images_encoded_total"),
    )


def file_part(data: bytes, **options: Any) -> dict[str, Any]:
    url = data_url(data, "video/mp4")
    return {"type": "video_url", "video_url": {"url": url, **options}}


def reference_text(model: VideoModel, seeds: Sequence[int], fps: float) -> str:
    """transformers' answer to "look" and a video."""
    told = model.rules.text(model.times(seeds, fps))
    prompt = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"look: {told}how many?<|im_end|>\n<|im_start|>assistant\n"
    )
    request = model.ask(Harness(model.net), "x", seeds, fps)
    images = request.images
    tokens, spans = model.net.spec.expand_prompt(
        model.tokenizer.encode(prompt).ids, images, model.rules.steps(model.times(seeds, fps))
    )
    asked = Request("x", tokens, spans, images, request.sampling)
    return str(model.tokenizer.decode(model.answer(asked, seeds, fps), skip_special_tokens=True))


def test_a_video_of_frames_answers_as_transformers_and_costs_its_work_once(
    tiny: Server, tmp_path: Path
) -> None:
    set_threads()
    model = load("qwen3_vl", tmp_path / "model")
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY, max_retries=0)
    before = decoded_and_encoded(tiny)

    def since() -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(decoded_and_encoded(tiny), before))

    def answer(seeds: Sequence[int]) -> str:
        parts = (text_part("look: "), clip(model, seeds, fps=2), text_part("how many?"))
        found = ask(client, [user(*parts)], max_tokens=12)
        return str(found.choices[0].message.content)

    same = tiny.metric("saccade_duplicate_images_total")
    seeds = (1, 2, 3, 4, 5, 5)
    wanted = reference_text(model, seeds, 2.0)
    assert len(wanted) > 2
    assert answer(seeds).startswith(wanted)
    assert since() == (3, 3)
    assert answer(seeds).startswith(wanted)
    assert since() == (3, 3), "a seen video"
    grown = (*seeds, 6, 7)
    assert answer(grown).startswith(reference_text(model, grown, 2.0))
    assert since() == (4, 4), "one more second: its pair"
    ask(client, [user(text_part("a still: "), image_part(model.pixels(5)))], max_tokens=1)
    assert since() == (4, 4), "the pair of a frame twice is its still image"
    window = (*grown[2:], 8, 9)
    assert answer(window).startswith(reference_text(model, window, 2.0))
    assert since() == (5, 5), "a window that slides: its new pair"
    part = clip(model, (*window, 10, 11), fps=2)
    found = ask(client, [user(part)], max_tokens=1, extra_body={"saccade": {"trace": True}})
    (video,) = (found.model_extra or {})["saccade"]["videos"]
    assert video["place"] == "messages[0].content[0]"
    assert video["found"]["encoded"] == 1 and sum(video["found"].values()) == 5
    assert video["summary"].startswith("pairs 5: ") and "1 encoded" in video["summary"]
    other = io.BytesIO()
    PIL.Image.fromarray(model.pixels(5)).save(other, "BMP")
    url = data_url(other.getvalue(), "image/bmp")
    again = {"type": "image_url", "image_url": {"url": url}}
    ask(client, [user(text_part("another file: "), again)], max_tokens=1)
    assert since() == (7, 6), "its pixels are those of the still image"
    assert tiny.metric("saccade_duplicate_images_total") == same + 1
    check_files(tiny, client)


def check_files(server: Server, client: openai.OpenAI) -> None:
    """A file costs each of its frames once, whoever asks, also when it is cut otherwise."""
    frames = "saccade_video_frames_decoded_total"
    before = decoded_and_encoded(server)
    (_, encoded) = before
    ask(client, [user(file_part(clip_file(), fps=4), text_part("how many?"))], max_tokens=2)
    assert server.metric(frames) == 24
    assert decoded_and_encoded(server)[1] == encoded + 12
    ask(client, [user(file_part(clip_file(), fps=4), text_part("and now?"))], max_tokens=2)
    assert server.metric(frames) == 24, "a seen file"
    assert decoded_and_encoded(server)[1] == encoded + 12


def test_two_overlapping_samplings_of_a_file_cost_their_union_once(
    tiny: Server, checkpoint: Callable[..., Path]
) -> None:
    rules = load_spec(checkpoint("qwen3_vl")).video
    assert rules is not None
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY, max_retries=0)
    data, frames = clip_file(size=(128, 64)), "saccade_video_frames_decoded_total"
    before = (*decoded_and_encoded(tiny), tiny.metric(frames))
    seen: set[tuple[int, ...]] = set()
    for count in (48, 44, 48, 44):
        indices = rules.sample(48, 8.0, VideoOptions(num_frames=count))
        pairs = images_of(FrameTimes(indices, 8.0, 8.0), rules.frames)
        seen |= {tuple(indices[place] for place in pair) for pair in pairs}
        part = file_part(data, num_frames=count, max_pixels=64 * 128)
        ask(client, [user(text_part(f"{count}: "), part)], max_tokens=1)
        now = (*decoded_and_encoded(tiny), tiny.metric(frames))
        cost = [each - then for each, then in zip(now, before, strict=True)]
        assert cost == [len(seen), len(seen), 2 * len(seen)]
    assert len(seen) == 36, "24 pairs and 22, of which 10 are the same"


def test_of_a_list_that_grows_only_new_pairs_and_the_question_are_computed(
    tiny: Server, checkpoint: Callable[..., Path]
) -> None:
    """Asked each second; then computed beforehand, as it comes (`max_tokens: 0`)."""
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY, max_retries=0)
    tokenizer = Tokenizer.from_file(str(checkpoint("qwen3_vl") / "tokenizer.json"))
    question = "what has changed?"
    tail = len(tokenizer.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n").ids)
    screens = [picture(64, 96, seed=seed) for seed in range(900, 920)]

    def used(pairs: int, *asked: dict[str, Any], most: int = 2) -> tuple[int, int]:
        """Tokens of the prompt, and those of it that were found."""
        frames = [png_url(pixels) for pixels in screens[: 2 * pairs]]
        video = {"type": "video", "video": frames, "fps": 2, "max_pixels": 64 * 96}
        answer = ask(client, [user(text_part("live: "), video, *asked)], max_tokens=most)
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens

    counts = [used(pairs, text_part(question)) for pairs in range(3, 9)]
    pair = counts[1][0] - counts[0][0]
    assert pair > PAGE
    for (old, _), (new, cached) in pairwise(counts):
        assert new == old + pair
        assert cached == (old - tail) // PAGE * PAGE, "up to where the question stood"
    used(10, most=0)
    prompt, cached = used(10, text_part(question))
    assert cached == (prompt - tail) // PAGE * PAGE, "the question costs the question"


@pytest.mark.slow
def test_a_seen_clip_costs_nothing_after_a_restart(tmp_path: Path) -> None:
    set_threads()
    load("qwen3_vl", tmp_path / "model")
    minute, folder = clip_file(frames=480), str(tmp_path / "embeddings")
    told = (*COMMON, "--embedding-cache-dir", f"{folder}:64MiB")
    answers = []
    for pairs in (60, 0):
        with serving(tmp_path / "model", tmp_path, *told) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            part = file_part(minute, max_pixels=64 * 96)
            found = ask(client, [user(part, text_part("how many?"))], max_tokens=8)
            answers.append(found.choices[0].message.content)
            assert decoded_and_encoded(server) == (pairs, pairs)
            assert server.metric("saccade_video_frames_decoded_total") == 2 * pairs
            assert server.metric("saccade_headers_read_total") == bool(pairs)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_two_ranks_answer_two_users_about_one_clip_as_one_rank_does(tmp_path: Path) -> None:
    """The clip costs its work once, whoever asks."""
    set_threads()
    model = load("qwen3_vl", tmp_path / "model")
    seeds, answers = (1, 2, 3, 4), []
    for ranks in (1, 2):
        told = (*COMMON, "--tp-size", str(ranks))
        with serving(tmp_path / "model", tmp_path, *told) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            for name in ("ann", "bob"):
                parts = (text_part("look: "), clip(model, seeds, fps=2), text_part("how many?"))
                found = ask(client, [user(*parts)], max_tokens=12, extra_body={"user": name})
                answers.append(found.choices[0].message.content)
                assert decoded_and_encoded(server) == (2, 2)
    assert set(answers) == {answers[0]}
    assert str(answers[0]).startswith(reference_text(model, seeds, 2.0))


def test_a_clip_behind_a_router_and_an_encoder_is_encoded_once_by_the_encoder(
    tmp_path: Path,
) -> None:
    """Its pairs are; those of a file are encoded where their text is."""
    set_threads()
    model = load("qwen3_vl", tmp_path / "model")
    seeds = (1, 2, 3, 4, 5, 5)
    encode = ("--role", "encode", "--api-key", KEY, "--metrics-without-key")
    with ExitStack() as stack:
        encoder = stack.enter_context(serving(tmp_path / "model", tmp_path, *COMMON[:4], *encode))
        own = ("--role", "language", "--encoders", encoder.url, "--encoder-key", KEY)
        server = stack.enter_context(serving(tmp_path / "model", tmp_path, *COMMON, *own))
        router = stack.enter_context(routing([server], tmp_path))
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)

        def answer(seeds: Sequence[int]) -> str:
            parts = (text_part("look: "), clip(model, seeds, fps=2), text_part("how many?"))
            return str(ask(client, [user(*parts)], max_tokens=12).choices[0].message.content)

        grown = (*seeds, 6, 7)
        for shown, pairs in ((seeds, 3), (seeds, 3), (grown, 4)):
            assert answer(shown).startswith(reference_text(model, shown, 2.0))
            assert decoded_and_encoded(server) == (0, 0)
            assert decoded_and_encoded(encoder) == (pairs, pairs)
        httpx.post(f"{server.url}/flush_cache").raise_for_status()
        assert answer(grown).startswith(reference_text(model, grown, 2.0))
        assert decoded_and_encoded(encoder) == (4, 4), "by their keys"
        ask(client, [user(file_part(clip_file(), fps=2), text_part("how many?"))], max_tokens=1)
        assert decoded_and_encoded(encoder) == (4, 4) and decoded_and_encoded(server)[1] == 6
