"""What recipes name: resamplers by one table, and operations of a family's own, which no shared
file knows.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import saccade.families
from saccade.core.arena import Arena
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions
from saccade.core.recipe import Box, ImageTile, ImageView, OwnPixels, PreprocessParams, whole
from saccade.families.registry import core_families, load_spec
from saccade.media.content import Probe, encode_array, read_raw
from saccade.media.formats.decode import decode_into
from saccade.media.formats.pixel_operations import RESAMPLERS, Pixels, own_module
from saccade.media.reasons import Undecodable
from saccade.media.workers.decode_queue import RESAMPLER_BYTES, Job, decoding_bytes
from saccade.media.workers.orders import Decode
from saccade.media.workers.pool import DecodePool
from tests.media.pictures import photo

DEMO = Path(saccade.__file__).parent / "demo" / "model"
PLANTED = """
warm = []

def warm_up(argument):
    warm.append(argument)

def draw(out, argument, pixels):
    if warm and warm != [argument]:
        raise AssertionError("another was warmed up")
    if argument == "refuse":
        raise ValueError(argument)
    out[:] = 255 - pixels[:out.shape[0], :out.shape[1]]
"""
FAMILY = """
from saccade.plugin import Family

PLANTED = Family("", "", (), ("planted",), pixels="saccade.families.planted.pixels")
"""
START = "import saccade.families\nsaccade.families.__path__.append({!r})\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A family with pixels alone, in this process and in those that it starts."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text(FAMILY)
    (tmp_path / "planted" / "pixels.py").write_text(PLANTED)
    (tmp_path / "sitecustomize.py").write_text(START.format(str(tmp_path)))
    monkeypatch.setattr(saccade.families, "__path__", [*saccade.families.__path__, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    core_families.cache_clear()
    yield tmp_path
    core_families.cache_clear()
    sys.modules.pop("saccade.families.planted.pixels", None)
    sys.modules.pop("saccade.families.planted", None)


def own(argument: str = "", height: int = 40, width: int = 60) -> OwnPixels:
    return OwnPixels("planted", argument, (height, width), source_bytes=5, other_bytes=1000)


def drawn(recipe: PreprocessParams, pixels: Pixels) -> Pixels:
    canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
    size = (pixels.shape[0], pixels.shape[1])
    decode_into([(canvas, recipe)], memoryview(encode_array(pixels)), size, 1)
    return canvas


def test_the_names_of_stored_embeddings_stay() -> None:
    """Families' settings are digests of these texts."""
    assert repr(whole((32, 48), (1, 2))) == (
        "ImageRecipe(canvas=(32, 48), grid=(1, 2), views=(ImageView(size=(32, 48), box=None, "
        "at=(0, 0), tiles=()),), fill=None, resample='bicubic', through=(), processor=None, "
        "tensors=())"
    )
    cut = ImageView((32, 64), tiles=(ImageTile(Box(0, 0, 32, 32), (0, 0)),))
    views = (cut, ImageView((32, 32), Box(1, 2, 3, 4), (32, 0)))
    recipe = PreprocessParams((64, 32), (2,), views, (1, 2, 3), "pillow_bicubic", ((90, 80),))
    assert repr(recipe) == (
        "ImageRecipe(canvas=(64, 32), grid=(2,), views=(ImageView(size=(32, 64), box=None, at=(0, "
        "0), tiles=(ImageTile(window=Box(top=0, left=0, bottom=32, right=32), at=(0, 0)),)), "
        "ImageView(size=(32, 32), box=Box(top=1, left=2, bottom=3, right=4), at=(32, 0), "
        "tiles=())), fill=(1, 2, 3), resample='pillow_bicubic', through=((90, 80),), "
        "processor=None, tensors=())"
    )


def test_what_a_family_draws_is_part_of_the_name_and_its_memory_is_not() -> None:
    plain = whole((32, 48))
    names = {repr(replace(plain, own=each)) for each in (None, own(), own("x"), own(height=41))}
    assert len(names) == 4
    assert repr(own()) == repr(replace(own(), source_bytes=6, other_bytes=0))


@pytest.mark.parametrize("resample", RESAMPLERS)
def test_each_resampler_keeps_an_even_colour_and_makes_the_size(resample: str) -> None:
    recipe = replace(whole((24, 36)), resample=resample)
    assert (drawn(recipe, np.full((50, 70, 3), 99, np.uint8)) == 99).all()
    made = drawn(recipe, photo(50, 70))
    assert len({each.tobytes() for each in (made, drawn(whole((24, 36)), photo(50, 70)))}) == (
        1 if resample == "bicubic" else 2
    )


def test_the_memory_of_each_resampler_that_reads_whole_images_is_counted() -> None:
    whole_images = {name for name, each in RESAMPLERS.items() if not each.by_strips}
    assert whole_images == RESAMPLER_BYTES.keys()


def test_a_recipe_of_no_family_is_refused() -> None:
    with pytest.raises(ImportError, match="qwen3_vl has no operation"):
        own_module(OwnPixels("qwen3_vl", "", (1, 1)))


def test_a_family_s_own_operation_makes_the_canvas(folder: Path) -> None:
    pixels = photo(50, 70)
    recipe = PreprocessParams((40, 60), (), (), own=own())
    np.testing.assert_array_equal(drawn(recipe, pixels), 255 - pixels[:40, :60])
    with pytest.raises(Undecodable) as refused:
        drawn(replace(recipe, own=own("refuse")), pixels)
    assert refused.value.reason.name == "processor"


def test_or_another_image_that_shared_operations_go_on_with(folder: Path) -> None:
    pixels = photo(50, 70)
    rest = PreprocessParams((32, 48), (), (ImageView((20, 48)), ImageView((12, 48), at=(20, 0))))
    for after in (rest, replace(rest, through=((30, 30),)), whole((40, 60))):
        expected = drawn(after, np.ascontiguousarray(255 - pixels[:40, :60]))
        np.testing.assert_array_equal(drawn(replace(after, own=own()), pixels), expected)


def test_its_memory_counts_by_the_image_and_by_what_it_makes() -> None:
    probe = Probe("PNG", 50, 70, "RGB", 1, 1)
    canvas = PreprocessParams((40, 60), (), ())
    besides = decoding_bytes(probe, 0, [canvas])
    assert decoding_bytes(probe, 0, [replace(canvas, own=own())]) == besides + 5 * 50 * 70 + 1000
    made = decoding_bytes(Probe("PNG", 40, 60, "RGB", 1, 1), 0, [whole((20, 30))])
    both = decoding_bytes(probe, 0, [replace(whole((20, 30)), own=own())])
    assert both - made == 9 * (50 * 70 - 40 * 60) + 5 * 50 * 70 + 1000 + 3 * 40 * 60


@pytest.mark.parametrize("name", ["", ".", "os.path", "qwen_vl.net", "../x", "a/b", "A", "x\n"])
def test_a_recipe_names_folders_of_families_alone(name: str) -> None:
    with pytest.raises(ValueError, match="is not a model family"):
        OwnPixels(name, "", (1, 1))
    told = Decode(0, 0, 1, (1, 1), 1, ((0, PreprocessParams((1, 1), (), (), own=own())),), 0)
    sent = msgspec.json.encode(told).replace(b'"planted"', json.dumps(name).encode())
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(sent, type=Decode)


DEFAULT_SERVER = """
import sys
from saccade.media.workers import supervisor
supervisor.warm_up(True, None)
print(*(name for name in sys.modules if name.startswith("saccade.families.")))
"""


@pytest.mark.more
def test_workers_of_a_default_server_import_no_family() -> None:
    assert load_spec(DEMO).sample.own is None
    done = subprocess.run(
        [sys.executable, "-c", DEFAULT_SERVER], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []


@pytest.mark.more
def test_a_worker_draws_what_a_new_family_brings(folder: Path) -> None:
    """Without an edit elsewhere: its folder is there, and a recipe names it."""
    pixels, arena = photo(50, 70), Arena.create(1 << 20)
    raw = encode_array(pixels)
    recipe = PreprocessParams((40, 60), (), (), own=own("x"))

    async def scenario() -> None:
        options = MediaOptions(media_workers=1, decode_timeout=60.0)
        pool = DecodePool(arena, options, Metrics(), own=recipe.own)
        pool.start()
        try:
            await pool.decode(Job(b"a", raw, read_raw(raw), recipe), 0)
        finally:
            await pool.close()

    asyncio.run(scenario())
    made = np.array(arena.whole()[: 3 * 40 * 60]).reshape(40, 60, 3)
    np.testing.assert_array_equal(made, 255 - pixels[:40, :60])
    arena.close()
