"""A message is the same whether it comes as JSON or as Python objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import InvalidRequest
from saccade.front.content import message_from_json, message_from_object, text_bytes
from saccade.front.part_defaults import PartDefaults
from saccade.media.sources.source import FileId, ImageSource

URL = "data:image/png;base64,AAAA"
CALL = {"function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "developer", "content": [{"type": "text", "text": "Hi"}, "there"]},
    {"role": "user", "content": [{"type": "image_url", "image_url": URL, "max_pixels": 4096}]},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}],
    },
    {"role": "user", "content": [{"type": "image_file", "image_file": {"file_id": "file-1"}}]},
    {"role": "user", "content": [{"type": "file", "file": {"file_data": URL, "filename": "x"}}]},
    {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]},
    {"role": "tool", "tool_call_id": "c", "content": "ok", "name": None, "parsed": {"x": 1}},
    {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}},
            {"function": {"name": "f", "arguments": {"a": None, "b": 1.0}}, "custom": 1},
            {"function": {"name": "f", "arguments": "{broken"}},
        ],
    },
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: json.dumps(message)[:60])
def test_json_and_python_say_the_same(message: dict[str, Any]) -> None:
    raw = msgspec.Raw(json.dumps(message).encode())
    assert message_from_object(message, "m") == message_from_json(raw, "m", PartDefaults())


def test_a_calls_arguments_are_the_clients_own() -> None:
    calls = message_from_object(MESSAGES[-1], "m").fields["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [
        {"a": None},
        {"a": None, "b": 1.0},
        "{broken",
    ]


def test_python_may_also_name_images_as_objects(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    parts = [pixels, Image.fromarray(pixels), path, b"bytes", {"type": "image", "image": path}]
    content = message_from_object({"role": "user", "content": tuple(parts)}, "m").content
    assert isinstance(content, tuple)
    sources = [part for part in content if isinstance(part, ImageSource)]
    assert [source.param for source in sources] == [f"m.content[{i}]" for i in range(5)]
    assert sources[2].url == sources[4].url == path.read_bytes()


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ", True),
        ("/9j/4AAQSkZJRgABAQAAAQABAAD_-AAAAAAAAAAAAA==", True),
        ("https://example.com/a.png", False),
        ("file:///a", False),
        ("example.com/pictures/of/a/cat/on/a/mat.png", False),
        ("short", False),
    ],
)
def test_bare_base64_is_told_from_a_url(url: str, bare: bool) -> None:
    part = {"type": "image_url", "image_url": url}
    content = message_from_object({"role": "user", "content": [part]}, "m").content
    assert isinstance(content, tuple) and isinstance(content[0], ImageSource)
    assert content[0].url == (f"data:;base64,{url}" if bare else url)


def test_an_uploaded_file_is_an_id() -> None:
    content = message_from_object(MESSAGES[4], "m").content
    assert isinstance(content, tuple) and isinstance(content[0], ImageSource)
    assert content[0].url == FileId("file-1")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "m.role"),
        ({"role": "robot", "content": "x"}, "m.role"),
        ({"role": "user"}, "m.content"),
        ({"role": "tool", "content": "x"}, "m.tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "m.tool_calls"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "m.content[0].image_url"),
        ({"role": "user", "content": [{"type": "audio", "audio": "x"}]}, "m.content[0].type"),
        ({"role": "user", "content": [{"type": "image", "image": 7}]}, "m.content[0]"),
    ],
)
def test_what_is_wrong_has_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        message_from_object(message, "m")
    assert caught.value.param == param


def test_text_is_measured_without_images() -> None:
    def size(message: dict[str, Any]) -> int:
        return text_bytes(msgspec.Raw(json.dumps(message).encode()))

    assert size({"role": "user", "content": "x" * 1000}) == 1002
    image = {"type": "image_url", "image_url": {"url": "y" * 5000}}
    text = {"type": "text", "text": "x" * 1000}
    assert size({"role": "user", "content": [image, text, text]}) == 2004
    assert size({"role": "user", "content": 7}) == 1
