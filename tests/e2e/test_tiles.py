"""The path of an image that is cut into tiles, end to end: what is done once is done once, and its
tiles cross processes once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import PIL.Image
import pytest

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.lab.checkpoint import make_checkpoint
from tests.e2e.test_picture_path import (
    DECODED,
    ENCODED,
    OPTIONS,
    SHIPPED,
    ask,
    image,
    png,
    spent,
    traced,
    words,
)
from tests.helpers.images import text_part, user

pytestmark = pytest.mark.slow
SIDE = 112
SIZES = {(64, 64): 1, (90, 200): 3, (230, 70): 4, (200, 300): 7}
"""Height and width of images, and the tiles they become, thumbnails included."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_checkpoint("tiny-internvl", tmp_path_factory.mktemp("model") / "tiny")
    with serving(folder, tmp_path_factory.mktemp("log"), *OPTIONS) as server:
        yield server


def test_an_image_a_round_is_decoded_encoded_and_shipped_once(server: Server) -> None:
    messages: list[dict[str, Any]] = []
    shipped = 0
    with spent(server, DECODED, ENCODED, SHIPPED) as so_far:
        for i, ((height, width), tiles) in enumerate(SIZES.items(), 1):
            messages.append(user(image(png(height, width)), text_part("and this?")))
            messages.append({"role": "assistant", "content": words(ask(server, *messages))})
            shipped += tiles * SIDE**2 * 3
            assert so_far() == [i, i, shipped]
    with spent(server, DECODED, ENCODED, SHIPPED) as so_far:
        answer = ask(server, *messages, user(text_part("which was best?")), saccade={"trace": True})
        assert so_far() == [0, 0, 0]
    found = answer["saccade"]["images"]
    assert [each["found"] for each in found] == ["kv"] * len(SIZES)
    assert [each["tokens"] for each in found] == [16 * tiles for tiles in SIZES.values()]


def test_fewer_tiles_are_other_pixels_of_the_same_bytes(server: Server) -> None:
    data = png(200, 300)
    part, smaller = image(data), image(data, max_pixels=SIDE**2)
    with spent(server, DECODED, ENCODED) as so_far:
        assert traced(server, part, text_part("what?"))[0]["tokens"] == 16 * 7
        assert traced(server, smaller, text_part("what?"))[0]["tokens"] == 16
        assert traced(server, text_part("again: "), part, smaller)[0]["found"] == "embedding"
        assert so_far() == [2, 2]


def test_answers_are_the_same_cold_and_warm(server: Server) -> None:
    message = user(
        text_part("one "), image(png(230, 70)), image(png(90, 200)), text_part(" which?")
    )
    cold = words(ask(server, message, cache_salt="cold", max_tokens=24))
    assert [words(ask(server, message, max_tokens=24)) for _ in range(2)] == [cold] * 2


def tiles(server: Server, outcome: str) -> float:
    return server.metric("saccade_image_tiles_total", outcome=outcome)


def test_a_changed_picture_costs_its_changed_tiles(server: Server) -> None:
    """In a chat of two pictures: the trace says which tiles were new, and where they are."""
    before = PIL.Image.effect_noise((600, 400), 60).convert("RGB")
    after = before.copy()
    after.paste((255, 0, 0), (580, 380, 600, 400))  # in the last tile of 2 x 3
    bodies = [user(image(encoded(each)), text_part("and this?")) for each in (before, after)]
    new, seen = tiles(server, "new"), tiles(server, "seen")
    named = server.metric("saccade_tile_bytes_hashed_total")
    (first,) = ask(server, bodies[0], saccade={"trace": True})["saccade"]["images"]
    assert first["tiles"]["new"] == 7 and first["tiles"]["seen"] == 0
    assert len(first["tiles"]["places"]) == 6, "the thumbnail shows everything"
    cold = ask(server, bodies[1], cache_salt="other")
    patches = server.metric("saccade_image_patches_encoded_total")
    warm = ask(server, bodies[1], saccade={"trace": True})
    (second,) = warm["saccade"]["images"]
    assert second["tiles"] == {"seen": 5, "new": 2, "places": [[0.5, 0.6667, 1.0, 1.0]]}
    assert words(warm) == words(cold), "another tenant's tiles are its own"
    assert (tiles(server, "new") - new, tiles(server, "seen") - seen) == (7 + 7 + 2, 5)
    rows = (server.metric("saccade_image_patches_encoded_total") - patches) / 2
    assert rows == 1 + (SIDE // 14) ** 2
    assert server.metric("saccade_tile_bytes_hashed_total") - named == 3 * 7 * SIDE**2 * 3
    with spent(server, DECODED, ENCODED) as so_far:
        (again,) = ask(server, bodies[1], saccade={"trace": True})["saccade"]["images"]
        assert "tiles" not in again and so_far() == [0, 0]


def encoded(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
