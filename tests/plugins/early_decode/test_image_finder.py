"""Images are found in a body however it is cut, and what is none costs a bounded search."""

from __future__ import annotations

import json
import os
from typing import Any

import pybase64
import pytest

from saccade.plugins.early_decode.image_finder import MAX_SHORT, MIN_TEXT, ImageFinder

TEXTS = [pybase64.b64encode(os.urandom(MIN_TEXT)).decode() for _ in range(2)]
URL = f"data:image/png;base64,{TEXTS[0]}"


def found(body: bytes, size: int) -> list[str]:
    finder = ImageFinder()
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    texts = [text for chunk in chunks for text in finder.feed(chunk)]
    return [b"".join(text).decode() for text in texts]


def body_of(*parts: dict[str, Any], **dump: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": parts}]}, **dump).encode()


@pytest.mark.parametrize("size", [1, 7, 1000, MIN_TEXT, 1 << 20])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_images_are_found_in_any_chunks(size: int, separators: tuple[str, str]) -> None:
    chat = {"type": "image_url", "image_url": {"url": URL}}
    message = {"type": "image", "source": {"type": "base64", "data": TEXTS[1]}}
    body = body_of(chat, {"type": "text", "text": "data:image/png"}, message, separators=separators)
    assert found(body, size) == TEXTS


def test_an_image_is_found_as_soon_as_its_last_byte_is_here() -> None:
    body = body_of({"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "?"})
    end = body.index(TEXTS[0].encode()) + len(TEXTS[0])
    finder = ImageFinder()
    assert not list(finder.feed(body[:end]))
    assert list(finder.feed(body[end : end + 1]))


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize(
    "text",
    ["x" * 3 * MIN_TEXT, f"data:text/plain;base64,{TEXTS[0]}", "data:image/png;base64,aaaa"],
    ids=["text", "another type", "a small image"],
)
def test_other_strings_are_no_images(text: str, size: int) -> None:
    assert found(body_of({"type": "image_url", "image_url": {"url": text}}), size) == []


def test_a_body_of_short_strings_ends_the_search() -> None:
    short = b'"data:image/png;base64,aaaa",' * MAX_SHORT
    assert found(short[:-29] + f'"{URL}"'.encode(), 1 << 20) == [TEXTS[0]]
    assert found(short + f'"{URL}"'.encode(), 1 << 20) == []
