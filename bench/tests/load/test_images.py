from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import ConfigError
from saccade_bench.load.images import (
    Dice,
    DrawnImage,
    Sizes,
    draw,
    encode,
    parse_resolution,
    parse_size,
)
from saccade_bench.options import ImageContent

PIXELS: dict[
    tuple[ImageContent, int], str
] = {  # first 16 hex digits of the SHA-256 of the RGB pixels of a 321 x 200 picture of seed 5
    ("random", 0): "049d6f318b7e0219",
    ("photo", 0): "d02ba9452da24e27",
    ("document", 0): "431b3f4d1d23c40f",
    ("blank", 0): "490e9ca5a70ac949",
    ("document", 3): "16778f80f3e74783",
}


@pytest.mark.parametrize(("content", "step"), PIXELS)
def test_a_seed_gives_the_same_pixels_on_every_machine(content: ImageContent, step: int) -> None:
    pixels = draw(DrawnImage(content, 321, 200, 5, step=step))
    assert pixels.size == (321, 200)
    assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == PIXELS[content, step]


@pytest.mark.parametrize("content", ["random", "photo", "document", "blank"])
def test_another_seed_gives_another_picture(content: ImageContent) -> None:
    assert len({draw(DrawnImage(content, 160, 96, seed)).tobytes() for seed in range(8)}) == 8


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_a_picture_is_encoded_in_the_format_asked_for(kind: str) -> None:
    picture = DrawnImage("photo", 120, 80, 1, kind)  # type: ignore[arg-type]
    encoded = encode(picture)
    with Image.open(io.BytesIO(encoded)) as image:
        assert (image.format, image.size) == (kind.upper(), (120, 80))
        if kind == "png":
            assert image.tobytes() == draw(picture).tobytes()
    assert encode(picture) == encoded


def test_photographs_compress_like_photographs_and_noise_like_noise() -> None:
    size = {
        content: len(encode(DrawnImage(content, 1280, 720, 2))) / (1280 * 720)
        for content in ("random", "photo", "document", "blank")
    }
    assert size["random"] > 0.7  # bytes per pixel
    assert 0.1 < size["photo"] < 0.4
    assert 0.1 < size["document"] < 0.4
    assert size["blank"] < 0.02


def test_the_next_screenshot_differs_in_a_few_places_only() -> None:
    first, second = (
        np.asarray(draw(DrawnImage("document", 640, 360, 9, step=step))) for step in (4, 5)
    )
    changed = (first != second).any(axis=2).mean()
    assert 0 < changed < 0.05


def test_resolutions_are_width_by_height_or_names_or_ranges() -> None:
    assert parse_resolution("1120x700") == Sizes((1120, 700), (1120, 700))
    assert parse_resolution("1440p") == Sizes((2560, 1440), (2560, 1440))
    assert (parse_size("1120x700"), parse_size("1440p")) == ((1120, 700), (2560, 1440))
    ranged = parse_resolution("random:64x32-128x40")
    drawn = [ranged.draw(Dice(seed)) for seed in range(200)]
    assert {min(w for w, _ in drawn), max(w for w, _ in drawn)} <= set(range(64, 129))
    assert {h for _, h in drawn} == set(range(32, 41))


@pytest.mark.parametrize("text", ["", "0x5", "12", "12 x 5", "random:9x9-5x5", "8k", "-5x5"])
def test_a_wrong_resolution_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--resolutions"):
        parse_size(text)
    with pytest.raises(ConfigError, match="--image-resolution"):
        parse_resolution(text)
