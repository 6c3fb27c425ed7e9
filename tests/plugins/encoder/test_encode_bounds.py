"""What a server of role encode is asked for is bounded before anything is made of its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from saccade.core.arena import Arena
from saccade.core.errors import InvalidRequest
from saccade.core.family import LargestImage
from saccade.core.metrics import Metrics
from saccade.core.options import ServeOptions
from saccade.core.types import Grid, Image, ImageKey, Size, Tower
from saccade.core.video import FrameBudget, VideoOptions
from saccade.media.media import Media
from saccade.media.sources.source import VideoSource
from saccade.plugins.encoder.exchange import EmbeddingRequest
from saccade.plugins.encoder.handlers import EmbeddingHandler, source_of
from tests.media.conftest import PictureSpec

TOWER = Tower("ab" * 16, "bfloat16", 2048)
FITS = Image(ImageKey(bytes(32), bytes(16)), (1, 4, 4), 4, 16, (64, 64))


class Spec(PictureSpec):
    largest_image = LargestImage(1024 * 1024, 1024)


def read(image: Image) -> EmbeddingRequest:
    """As a request for it is read, by a server with 16 MiB of shared memory."""
    spec, arena = Spec(), Arena.create(16 << 20)
    media = Media(spec, ServeOptions(), arena, Metrics())  # type: ignore[arg-type]
    intake = SimpleNamespace(spec=spec, media=media)
    front = SimpleNamespace(intake=intake, check_ready=lambda: SimpleNamespace(tower=TOWER))
    handler = EmbeddingHandler(SimpleNamespace(front=front))  # type: ignore[arg-type]
    try:
        return handler._read(msgspec.json.encode(EmbeddingRequest(image, TOWER)).decode())
    finally:
        arena.close()


def image(grid: Grid, num_tokens: int, patches: int = 16, canvas: Size = (64, 64)) -> Image:
    return Image(FITS.key, grid, num_tokens, patches, canvas)


def test_an_image_that_there_can_be_is_read() -> None:
    assert read(FITS).image == FITS


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (image((1, 4, 5 * 10**7), 5 * 10**7), "grid is 50000000: it exceeds"),
        (image((1, 4, 10**9), 10**9), "grid is 1000000000: it exceeds"),
        (image((1, 4, 2**62), 2**62), f"grid is {2**62}: it exceeds"),
        (image((1, 4, 10**6), 10**6), "num_tokens is 1000000: it exceeds"),
        (image((1, 4, 4), 2**62), f"num_tokens is {2**62}: it exceeds"),
        (image((1, 4, 4), 4, patches=2**62), f"num_patches is {2**62}: it exceeds"),
        (image((1, 4, 4), 4, canvas=(2**62, 1)), f"canvas is {2**62}: it exceeds"),
        (image((1, 4, 4), 4, canvas=(1 << 20, 1 << 20)), "canvas is 1099511627776: it exceeds"),
        (image((1, -4, -4), 4), "the image is invalid"),
        (image((1, 4, 4), 4, canvas=(64, -64)), "the image is invalid"),
        (image((1, 4, 4), 5), "the image is invalid"),
        (image((0, 0, 0), 0), "the image is invalid"),
    ],
)
def test_numbers_beyond_all_images_are_refused_by_name(wanted: Image, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        read(wanted)
    assert caught.value.param == "x-saccade-image"


def asked(*nbytes: int, count: int = 8, **options: int) -> EmbeddingRequest:
    frames = FrameBudget(count, VideoOptions(**options))
    return EmbeddingRequest(FITS, TOWER, frames=frames, nbytes=nbytes)


def test_a_pairs_files_are_cut_from_the_body() -> None:
    rules: Any = SimpleNamespace(frames=2)
    for wanted, files in ((asked(2, 3), (b"ab", b"cde")), (asked(5, count=1), (b"abcde",))):
        found = source_of(wanted, b"abcde", rules)
        assert found.url == files and isinstance(found, VideoSource)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (asked(), "nbytes"),
        (asked(2, 4), "nbytes"),
        (asked(-1, 6), "nbytes"),
        (asked(0, 5), "nbytes"),
        (asked(1, 2, 2), "nbytes"),
        (asked(2, 3, count=1), "nbytes"),
        (asked(2, 3, count=2**62), "frames.count is"),
        (asked(2, 3, max_pixels=-1), "pixels of frames"),
        (asked(2, 3, total_pixels=2**62), "pixels of frames"),
        (asked(2, 3, num_frames=2**62), "num_frames must be"),
    ],
)
def test_a_pair_that_cannot_be_is_refused_by_name(wanted: EmbeddingRequest, told: str) -> None:
    rules: Any = SimpleNamespace(frames=2)
    with pytest.raises(InvalidRequest, match=told):
        source_of(wanted, b"abcde", rules)
    with pytest.raises(InvalidRequest, match="nbytes"):
        source_of(asked(2, 3), b"abcde", None)
