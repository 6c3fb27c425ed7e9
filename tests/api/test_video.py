"""Videos over HTTP: each way to send frames is the same request, and what contradicts itself is
refused by name.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.core.types import Request
from tests.fixtures.tiny import picture
from tests.helpers.images import data_url
from tests.helpers.served import TOKENIZER, Served
from tests.media.clips import clip


def jpeg(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


FRAMES = [jpeg(picture(64, 96, seed)) for seed in range(5)]
URLS = [f"data:image/jpeg;base64,{frame}" for frame in FRAMES]
JOINED = f"data:video/jpeg;base64,{','.join(FRAMES)}"


def ask(served: Served, *parts: dict[str, Any], **body: Any) -> Any:
    content = [{"type": "text", "text": "look: "}, *parts, {"type": "text", "text": "how many?"}]
    messages = [{"role": "user", "content": content}]
    return served.http.post(
        "/v1/chat/completions", json={"model": "demo", "messages": messages, **body}
    )


def shown(request: Request) -> tuple[object, ...]:
    return request.tokens, request.spans, request.images


@pytest.mark.more
def test_every_way_to_send_frames_is_the_same_request(served: Served) -> None:
    ids = [
        served.http.post(
            "/v1/files",
            files={"file": ("f.jpg", base64.b64decode(frame))},
            data={"purpose": "vision"},
        ).json()["id"]
        for frame in FRAMES
    ]
    io_args = {"video": {"fps": 4, "frames_indices": [0, 2, 4, 6, 8], "total_num_frames": 10}}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "video", "video": URLS, "fps": 2}, {}),
        ({"type": "video", "video": [{"file_id": id} for id in ids], "fps": 2.0}, {}),
        ({"type": "video_url", "video_url": {"url": JOINED, "fps": 2}}, {}),
        ({"type": "video_url", "video_url": JOINED}, {}),
        ({"type": "video_url", "video_url": {"url": JOINED}}, {"media_io_kwargs": io_args}),
        ({"type": "video", "video": URLS}, {"mm_processor_kwargs": {"fps": 2}}),
        ({"type": "input_video", "video_url": JOINED}, {}),
    ]
    for part, body in ways:
        answer = ask(served, part, **body)
        assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]["prompt_tokens_details"]
    assert (used["image_tokens"], used["video_tokens"]) == (0, 18)
    first, *others = served.submitted
    assert all(shown(each) == shown(first) for each in others)
    text = TOKENIZER.decode([token for token in first.tokens if token != 7])
    seconds = (f"<{at} seconds><|vision_start|><|vision_end|>" for at in (0.2, 1.2, "2.0"))
    assert f"look: {''.join(seconds)}how many?" in text
    assert [image.grid for image in first.images] == [(2, 4, 6), (2, 4, 6), (1, 4, 6)]


def test_other_dialects_have_the_same_video(served: Served) -> None:
    assert ask(served, {"type": "video", "video": URLS, "fps": 1}).status_code == 200
    responses = {
        "model": "demo",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "look: "},
                    {"type": "input_video", "video_url": JOINED, "fps": 1},
                    {"type": "input_text", "text": "how many?"},
                ],
            }
        ],
    }
    assert served.http.post("/v1/responses", json=responses).status_code == 200
    source = {"type": "frames", "frames": URLS}
    content = [
        {"type": "text", "text": "look: "},
        {"type": "video", "source": source, "fps": 1},
        {"type": "text", "text": "how many?"},
    ]
    messages = {
        "model": "demo",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": content}],
    }
    assert served.http.post("/v1/messages", json=messages).status_code == 200
    first, *others = served.submitted
    assert len(others) == 2 and all(shown(each) == shown(first) for each in others)


def test_a_frame_alone_is_the_still_image(served: Served) -> None:
    still = {"type": "image_url", "image_url": {"url": URLS[0]}}
    assert ask(served, {"type": "video", "video": [URLS[0], URLS[0]]}, still).status_code == 200
    (request,) = served.submitted
    assert request.images[0] == request.images[1]


@pytest.mark.parametrize(
    ("part", "param", "word"),
    [
        ({"video": URLS, "fps": 2, "num_frames": 4}, ".num_frames", "are mutually exclusive"),
        ({"video": URLS, "num_frames": 0}, ".num_frames", "from 1 to 768"),
        ({"video": URLS, "num_frames": -2}, ".num_frames", ">= -1"),
        ({"video": URLS, "fps": 0}, ".fps", "1e-06"),
        ({"video": URLS, "fps": 1e-320}, ".fps", "1e-06"),
        ({"video": URLS, "source_fps": 1e-320}, ".source_fps", "1e-06"),
        ({"video": []}, "", "0 frames"),
        ({"video": URLS * 200}, "", "1000 frames"),
        ({"video": [URLS[0], 7]}, ".video[1]", "not int"),
        ({"video": [URLS[0], {"file": "x"}]}, ".video[1]", "file_id"),
        ({"video": [URLS[0], "data:image/jpeg;base64,eHh4"]}, "", ""),
        ({"video": URLS, "frames_indices": [0, 1]}, ".frames_indices", "frames_indices"),
        ({"video": URLS, "max_pixels": 7}, "", "max_pixels 7"),
        (
            {"video": [URLS[0], f"data:image/jpeg;base64,{jpeg(picture(32, 32))}"]},
            "",
            "send frames of one size",
        ),
    ],
)
def test_a_video_that_cannot_be_is_refused_by_its_place(
    served: Served, part: dict[str, Any], param: str, word: str
) -> None:
    answer = ask(served, {"type": "video", **part})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == f"messages[0].content[1]{param}" and word in error["message"], error
    assert not served.submitted


def test_all_frames_may_be_asked_for_in_vllms_words(served: Served) -> None:
    part = {"type": "video_url", "video_url": data_url(clip(8), "video/mp4")}
    every = {"num_frames": -1}
    answers = [
        ask(served, {**part, "fps": 1000}),
        ask(served, {**part, **every}),
        ask(served, part, mm_processor_kwargs=every),
        ask(served, part, media_io_kwargs={"video": every}),
    ]
    assert [each.status_code for each in answers] == [200] * 4
    first, *others = served.submitted
    assert all(shown(each) == shown(first) for each in others)


def test_a_template_that_shows_no_videos_is_named(served: Served) -> None:
    prompts = served.front.intake.prompts
    before, (source, *_) = prompts.template, prompts.template.sources
    prompts.template = type(before)({"default": source.replace("|video_pad|", "|")}, {})
    try:
        error = ask(served, {"type": "video", "video": URLS}).json()["error"]
        assert error["code"] == "no_video" and error["param"] == "messages[0].content[1]"
    finally:
        prompts.template = before


def test_an_uploaded_video_is_named_by_its_id_in_each_dialect(served: Served) -> None:
    data = clip()
    purpose = {"purpose": "user_data"}
    uploaded = served.http.post("/v1/files", files={"file": ("clip.mp4", data)}, data=purpose)
    id = uploaded.json()["id"]
    url = data_url(data, "video/mp4")
    inline = {"type": "video_url", "video_url": {"url": url, "num_frames": 8}}
    assert ask(served, inline).status_code == 200
    part = {"type": "input_video", "file_id": id, "num_frames": 8}
    assert ask(served, part).status_code == 200
    assert ask(served, {"type": "video", "video": {"file_id": id}, "num_frames": 8}).is_success
    look, how = ({"type": "input_text", "text": text} for text in ("look: ", "how many?"))
    asked = {"model": "demo", "input": [{"role": "user", "content": [look, part, how]}]}
    assert served.http.post("/v1/responses", json=asked).status_code == 200
    video = {"type": "video", "source": {"type": "file", "file_id": id}, "num_frames": 8}
    texts = ({"type": "text", "text": text} for text in ("look: ", "how many?"))
    first_text, last_text = texts
    messages = [{"role": "user", "content": [first_text, video, last_text]}]
    asked_too = {"model": "demo", "max_tokens": 9, "messages": messages}
    assert served.http.post("/v1/messages", json=asked_too).status_code == 200
    first, *others = served.submitted
    assert len(first.images) == 4 and len(others) == 4
    assert all(shown(each) == shown(first) for each in others)


def test_the_trace_says_once_that_a_files_audio_is_ignored(served: Served) -> None:
    for heard in (False, True):
        url = data_url(clip(sound=heard), "video/mp4")
        part = {"type": "video_url", "video_url": {"url": url, "fps": 4}}
        answer = ask(served, part, saccade={"trace": True})
        assert answer.status_code == 200, answer.text
        (video,) = answer.json()["saccade"]["videos"]
        assert sum(video["found"].values()) == 12
        assert video.get("note") == ("the audio is ignored" if heard else None)
        assert answer.text.count("audio") == heard


def test_a_broken_video_is_refused_when_it_is_uploaded(served: Served) -> None:
    upload = {"file": ("clip.mp4", clip()[:200])}
    answer = served.http.post("/v1/files", files=upload, data={"purpose": "vision"})
    assert answer.status_code == 400 and "video" in answer.json()["error"]["message"]
