from __future__ import annotations

import base64
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import ConfigError
from saccade_bench.load.datasets import Calibration, Maker, Recipe, build, parse_buckets, warmup
from saccade_bench.load.images import DrawnImage, encode
from saccade_bench.load.workload import File, Session, Template, answer_message, outline, prepare
from saccade_bench.options import (
    DatasetName,
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    RandomMM,
    TextOptions,
    VideoForm,
    VideoTurns,
)
from tests.helpers.images import data_url

SMALL = ImageOptions(image_resolution="64x48")


def recipe(
    data: DatasetOptions,
    prompts: int = 10,
    pictures: ImageOptions = SMALL,
    seed: int = 1,
    **text: Any,
) -> Recipe:
    return Recipe(
        data,
        LoadOptions(num_prompts=prompts, seed=seed),
        pictures,
        TextOptions(**text),
        RandomMM(),
        Calibration(10.0, 0.25),
    )


def pictures_of(session: Session) -> list[DrawnImage]:
    return [part for turn in session.turns for part in turn.parts if isinstance(part, DrawnImage)]


@pytest.mark.parametrize(
    "name",
    [
        "image",
        "random-mm",
        "multiturn-image",
        "repeat",
        "agent",
        "ocr",
        "text-beside-images",
        "video",
    ],
)
def test_a_seed_decides_the_whole_workload(name: DatasetName) -> None:
    data = DatasetOptions(dataset_name=name, rounds=3)
    bodies = [prepare(build(recipe(data, 4, seed=seed))) for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]


def test_no_picture_of_the_image_data_set_comes_twice_and_none_in_the_warm_up() -> None:
    wanted = recipe(DatasetOptions(dataset_name="image"), 20, replace(SMALL, image_count=3))
    wanted = replace(wanted, load=replace(wanted.load, warmup_requests=5))
    sessions = build(wanted)
    pictures = [
        picture for session in (*sessions, *warmup(wanted)) for picture in pictures_of(session)
    ]
    assert len(sessions) == 20
    assert len(pictures) == len(set(pictures)) == 75


def test_text_has_the_asked_length_by_the_servers_count() -> None:
    made = Maker(
        recipe(DatasetOptions(), random_input_len=200, random_output_len=50, random_range_ratio=1.0)
    )
    lengths = [len(made.question()) * 0.25 for _ in range(100)]
    assert abs(sum(lengths) / 100 - 200) < 2
    assert {made.answer_length() for _ in range(50)} == {50}


def test_the_range_ratio_is_the_shortest_share() -> None:
    made = Maker(recipe(DatasetOptions(), random_output_len=20, random_range_ratio=0.5))
    assert {made.answer_length() for _ in range(500)} == set(range(10, 21))


@pytest.mark.parametrize(("ratio", "repeats"), [(0.0, 0), (0.5, 30), (0.9, 54), (1.0, 59)])
def test_exactly_the_asked_share_of_pictures_came_before(ratio: float, repeats: int) -> None:
    data = DatasetOptions(dataset_name="repeat", repeat_ratio=ratio)
    chats = prepare(build(recipe(data, 30, replace(SMALL, image_count=2))))
    turns = [turn for chat in chats for turn in chat.turns]
    assert sum(turn.images for turn in turns) == 60
    assert sum(turn.seen for turn in turns) == repeats


def test_a_higher_zipf_exponent_makes_few_pictures_popular() -> None:
    most = []
    for exponent in (0.0, 1.0, 2.0):
        data = DatasetOptions(dataset_name="repeat", repeat_ratio=0.8, zipf=exponent)
        counts = Counter(
            picture for session in build(recipe(data, 400)) for picture in pictures_of(session)
        )
        assert len(counts) == 80
        most.append(counts.most_common(1)[0][1])
    assert most[0] < most[1] < most[2]


def test_tenants_share_no_picture_and_sessions_grow() -> None:
    data = DatasetOptions(dataset_name="repeat", tenants=3, sessions=6)
    sessions = build(recipe(data, 30))
    assert Counter(session.tenant for session in sessions) == {
        "tenant 0": 2,
        "tenant 1": 2,
        "tenant 2": 2,
    }
    assert sum(len(session.turns) for session in sessions) == 30
    owned = {
        name: {p for s in sessions if s.tenant == name for p in pictures_of(s)}
        for name in ("tenant 0", "tenant 1", "tenant 2")
    }
    assert not owned["tenant 0"] & owned["tenant 1"] and not owned["tenant 1"] & owned["tenant 2"]


def test_each_round_of_a_chat_sends_all_earlier_pictures_and_answers_again() -> None:
    data = DatasetOptions(dataset_name="multiturn-image", rounds=4)
    (chat,) = prepare(build(recipe(data, 1, replace(SMALL, image_count=2))))
    body = Template.build("m", {"top_k": 1}, True, False).body(
        chat, 3, [answer_message(f"answer {i}") for i in range(3)]
    )
    data_ = json.loads(body)
    assert [message["role"] for message in data_["messages"]] == ["user", "assistant"] * 3 + [
        "user"
    ]
    assert [message["content"] for message in data_["messages"][1::2]] == [
        "answer 0",
        "answer 1",
        "answer 2",
    ]
    urls = re.findall(rb"data:image/jpeg;base64,[^\"]+", body)
    assert len(urls) == len(set(urls)) == 8
    assert [turn.images for turn in chat.turns] == [2, 4, 6, 8]
    assert [turn.seen for turn in chat.turns] == [0, 2, 4, 6]
    assert (
        data_["model"],
        data_["stream"],
        data_["ignore_eos"],
        data_["top_k"],
        data_["max_tokens"],
    ) == ("m", True, True, 1, 128)
    assert data_["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in data_ and "saccade" not in data_


def test_an_agent_may_forget_all_but_its_last_screenshots() -> None:
    data = DatasetOptions(dataset_name="agent", rounds=5, keep_images=2)
    (chat,) = prepare(build(recipe(data, 1)))
    template = Template.build("m", {}, False, True)
    bodies = [template.body(chat, number, [answer_message("done")] * number) for number in range(5)]
    assert (
        [body.count(b"data:image/") for body in bodies]
        == [turn.images for turn in chat.turns]
        == [1, 2, 2, 2, 2]
    )
    assert json.loads(bodies[4])["messages"][0]["content"].startswith("[picture]\n")
    assert json.loads(bodies[0])["saccade"] == {"trace": True}


def test_buckets_decide_sizes_and_their_shares() -> None:
    data = DatasetOptions(dataset_name="random-mm")
    wanted = replace(
        recipe(data, 400, seed=2),
        random_mm=RandomMM(
            random_mm_base_items_per_request=2,
            random_mm_num_mm_items_range_ratio=0.5,
            random_mm_bucket_config="{(40, 80, 1): 1, (64, 64, 1): 3}",
        ),
    )
    sessions = build(wanted)
    sizes = Counter(
        (picture.width, picture.height) for session in sessions for picture in pictures_of(session)
    )
    assert set(sizes) == {(80, 40), (64, 64)}
    assert 0.7 < sizes[64, 64] / sizes.total() < 0.8
    assert {len(pictures_of(session)) for session in sessions} == {1, 2, 3}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "{(1, 2): 1}",
        "{(256, 256, 1): 0}",
        "{(0, 5, 1): 1}",
        "{(256, 256, 16): 1.0}",
    ],
)
def test_wrong_buckets_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--random-mm-bucket-config"):
        parse_buckets(text)


def test_readings_carry_the_text_that_is_in_the_picture() -> None:
    sessions = build(
        recipe(DatasetOptions(dataset_name="ocr"), 6, ImageOptions(image_resolution="200x120"))
    )
    questions = [turn.parts[1] for session in sessions for turn in session.turns]
    assert questions == ["What number is this?", "What word is this?"] * 3
    expected = [turn.expected or "" for session in sessions for turn in session.turns]
    assert [text.isdigit() for text in expected] == [True, False] * 3


def test_own_messages_become_chats_with_their_pictures(tmp_path: Path) -> None:
    encoded = encode(DrawnImage("blank", 32, 32, 1, "png"))
    (tmp_path / "a.png").write_bytes(encoded)
    url = data_url(encoded)
    content = [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "two?"},
    ]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "left out"},
        {"role": "user", "content": "and now?"},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"messages": messages, "max_tokens": 7, "expected": "yes"}) + "\n")
    first, second = build(recipe(DatasetOptions(dataset_name="custom", dataset_path=str(path)), 2))
    assert first == second
    assert first.turns[0].parts == (File(encoded, "png"), File(encoded, "png"), "two?")
    assert [(turn.max_tokens, turn.expected, len(turn.before)) for turn in first.turns] == [
        (7, "yes", 1),
        (7, "yes", 0),
    ]
    body = Template.build("m", {}, True, False).body(prepare([first])[0], 1, [answer_message("no")])
    assert [message["role"] for message in json.loads(body)["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize("text", [None, "not json", '{"messages": []}'])
def test_a_wrong_file_of_messages_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "own.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"own\.jsonl"):
        build(recipe(DatasetOptions(dataset_name="custom", dataset_path=str(path))))


@pytest.mark.parametrize(
    ("turns", "form", "sent", "seen"),
    [
        ("growing", "frames", [1, 2, 3], [0, 1, 2]),
        ("repeated", "frames", [3, 3, 3], [0, 3, 3]),
        ("overlapping", "frames", [3, 3, 3], [0, 2, 2]),
        ("growing", "file", [1, 2, 3], [0, 1, 2]),
        ("repeated", "file", [3, 3, 3], [0, 3, 3]),
        ("overlapping", "file", [3, 3, 3], [0, 3, 3]),
        ("growing", "images", [2, 4, 6], [0, 2, 4]),
    ],
)
def test_clips_grow_come_again_or_overlap(
    turns: VideoTurns, form: VideoForm, sent: list[int], seen: list[int]
) -> None:
    data = DatasetOptions(dataset_name="video", rounds=3, video_turns=turns, video_form=form)
    (chat,) = prepare(build(recipe(data, 1)))
    assert [turn.images for turn in chat.turns] == sent
    assert [turn.seen for turn in chat.turns] == seen
    body = json.loads(Template.build("m", {}, True, False).body(chat, 2, [b"{}", b"{}"]))
    (message,) = body["messages"]
    clip = message["content"][0]
    if form == "images":
        assert [part["type"] for part in message["content"]] == ["image_url"] * 6 + ["text"]
        return
    assert clip.get("video_url", clip)["max_pixels"] == 64 * 48
    if form == "file":
        data_ = base64.b64decode(clip["video_url"]["url"].removeprefix("data:video/mp4;base64,"))
        assert data_[4:8] == b"ftyp" and clip["video_url"]["fps"] == 2
    else:
        assert len(clip["video"]) == len(set(clip["video"])) == 2 * sent[2]
    assert outline(chat.turns[0])[0]["content"][0]["text"].startswith("[video ")


def test_every_frame_of_a_clip_differs_and_another_seed_is_another_clip() -> None:
    frames = [
        encode(DrawnImage("moving", 64, 48, seed, "png", step))
        for seed in (1, 2)
        for step in (0, 1)
    ]
    assert len(set(frames)) == 4


def test_a_clip_of_no_seconds_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--image-count 0"):
        build(recipe(DatasetOptions(dataset_name="video"), 1, replace(SMALL, image_count=0)))
