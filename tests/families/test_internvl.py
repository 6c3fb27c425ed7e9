"""Tiles: an image is cut up as transformers does it, pixel for pixel; what the tower and the
language model make of it is transformers' too, however tiles and ranks share the work.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from saccade.core.config import EncoderConfig
from saccade.core.errors import CheckpointError, ConfigError, InvalidRequest
from saccade.core.metrics import Metrics
from saccade.core.types import Grid, Image, ImageKey
from saccade.families.internvl.images import TileRules, tile_grid
from saccade.families.internvl.spec import InternVLSpec
from saccade.families.internvl.tiny import MOST_TILES, SIDE
from saccade.families.registry import load_spec
from saccade.media.decode import decode_into
from saccade.media.header import probe
from saccade.parallel import Shard
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.graphs import eager
from saccade.runtime.positions import PositionCache
from saccade.runtime.weights import load_net
from saccade_bench.fixtures.crew import shards, together
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.tiny import Reference, make_checkpoint, picture, reference
from saccade_bench.lab.qwen import grids
from tests.engine import test_parity as parity
from tests.families.forwarding import CPU, Session, encode, load
from tests.families.test_parity import LOGITS, pixels, prompt
from tests.media.pictures import decoded, noise, photo, with_orientation
from tests.media.pictures import encode as encode_file

TILED: str = "internvl"
QWEN3 = {"model_type": "qwen3", "head_dim": 16}
LARGER = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}
LARGER |= {"use_mean_pooling": False, "num_hidden_layers": 2}
"""The tower of the larger models, and a norm behind it, which none has but transformers knows."""
SIZES = [
    *((300, 150), (150, 300), (97, 131), (200, 201), (112, 168)),
    *((1, 1), (3, 2), (56, 56), (57, 55), (20, 31)),
    *((700, 1900), (2100, 800), (1200, 1201)),
    *((900, 4), (5, 1100), (2000, 90), (64, 640)),
]


def transparent(size: tuple[int, int], seed: int) -> bytes:
    image = PIL.Image.fromarray(photo(*size, seed=seed)).convert("RGBA")
    image.putalpha(PIL.Image.fromarray(noise(*size, seed=seed)[..., 0]))
    return encode_file(image, "PNG")


@cache
def files() -> list[bytes]:
    return [
        *(
            encode_file(photo(*size, seed=i), ("PNG", "JPEG")[i % 2])
            for i, size in enumerate(SIZES)
        ),
        *(transparent(size, i) for i, size in enumerate(SIZES[:6])),
        *(with_orientation(photo(90, 200), turn, "JPEG") for turn in range(1, 9)),
        *(with_orientation(photo(330, 64), turn, "PNG") for turn in range(1, 9)),
        encode_file(PIL.Image.fromarray(photo(120, 70)).convert("L"), "PNG"),
    ]


@pytest.fixture(scope="module")
def theirs(checkpoint: Callable[..., Path]) -> Reference:
    return reference(checkpoint(TILED))


@pytest.fixture(scope="module")
def spec(checkpoint: Callable[..., Path]) -> InternVLSpec:
    found = load_spec(checkpoint(TILED))
    assert isinstance(found, InternVLSpec)
    return found


# ---- images


@pytest.mark.more
def test_pixels_are_the_references(spec: InternVLSpec, theirs: Reference) -> None:
    assert len(files()) == 40
    seen = set()
    for data in files():
        header = probe(data, max_pixels=10**8)
        recipe = spec.recipe(*header.upright, spec.pixel_bounds)
        canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
        decode_into([(canvas, recipe)], memoryview(data), header.upright, header.orientation)
        np.testing.assert_array_equal(canvas, theirs.resize(decoded(data)))
        assert recipe.grid == spec.images.grid(*recipe.canvas)
        seen.add(recipe.grid[0])
    assert seen == {1, 3, 4, 5, 6, 7}, "of all counts there are, thumbnails included"


@settings(deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([(1, 12), (1, 6), (1, 1), (3, 7), (12, 12)]),
    st.sampled_from([448, 56]),
)
def test_tiles_are_the_references(
    height: int, width: int, bounds: tuple[int, int], side: int
) -> None:
    half = (0.5, 0.5, 0.5)
    rules = TileRules(side, *bounds, half, half, "bicubic", tokens=4, rows=17)
    columns, rows = get_optimal_tiled_canvas((height, width), (side, side), *bounds)
    assert tile_grid(height, width, rules) == (rows, columns)


def test_a_request_may_ask_for_fewer_tiles(spec: InternVLSpec) -> None:
    bounds = spec.pixel_bounds
    assert (bounds.least, bounds.max_pixels) == (SIDE**2, MOST_TILES * SIDE**2)
    assert spec.recipe(500, 1000, bounds).grid == (3,)
    fewer = replace(bounds, max_pixels=2 * SIDE**2 - 1)
    assert spec.recipe(500, 1000, fewer).grid == (1,), "alone, a tile is its own thumbnail"
    names = [spec.settings(spec.recipe(500, 1000, each)) for each in (fewer, bounds)]
    assert len(set(names)) == 2
    more = replace(bounds, min_pixels=5 * SIDE**2)
    assert spec.recipe(SIDE, SIDE, more).grid == (7,)
    largest = spec.largest_image
    assert (largest.pixels, largest.tokens) == (7 * SIDE**2, 7 * 4)


# ---- prompts


class Processor(transformers.InternVLProcessor):
    """transformers' own, but that it takes no video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


def processor(theirs: Reference) -> Processor:
    named = json.loads((theirs.folder / "tokenizer_config.json").read_text())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(theirs.folder / "tokenizer.json"),
        extra_special_tokens=named["extra_special_tokens"],
    )
    return Processor(theirs.processor, tokenizer, None, 4)


def test_prompts_are_expanded_as_the_reference_does_it(
    spec: InternVLSpec, theirs: Reference
) -> None:
    shown = [picture(*size, seed=i) for i, size in enumerate([(60, 60), (100, 230), (300, 90)])]
    words = "one <IMG_CONTEXT>\ntwo <IMG_CONTEXT><IMG_CONTEXT> three?"
    tokenizer = processor(theirs).tokenizer
    wanted = processor(theirs)(images=shown, text=words, return_tensors="pt").input_ids[0].tolist()
    recipes = [spec.recipe(each.shape[0], each.shape[1], spec.pixel_bounds) for each in shown]
    images = [image_of(spec, recipe.grid) for recipe in recipes]
    tokens = tokenizer(words).input_ids
    expanded, spans = spec.expand_prompt(tokens, images)
    assert list(expanded) == wanted
    assert [span.length for span in spans] == [4 * recipe.grid[0] for recipe in recipes]
    (content,), around = spec.placeholder.marks, spec.placeholder.before + spec.placeholder.after
    for span in spans:
        assert set(expanded[span.start : span.end]) == {content}
        assert (expanded[span.start - 1], expanded[span.end]) == around
    ends = iter(spans)
    for at, token in enumerate(tokens, 1):
        end = spec.widened(at, spans, images)
        assert end == next(ends).end + 1 if token == content else expanded[end - 1] == token
    positions, following = spec.positions(len(expanded), spans, ())
    assert positions.tolist() == [list(range(len(expanded)))] and following == len(expanded)
    with pytest.raises(InvalidRequest, match="3 image placeholders for 2 images"):
        spec.expand_prompt(tokens, images[:2])


def image_of(spec: InternVLSpec, grid: Grid) -> Image:
    size = (grid[0] * SIDE, SIDE)
    return Image(ImageKey(b"", b""), grid, spec.num_tokens(grid), spec.num_patches(grid), size)


# ---- the network


@pytest.mark.first
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "old"},
        {"tie": True},
        {"text": QWEN3},
        {"vision": LARGER},
    ],
    ids=["as it is", "as on the hub", "tied", "qwen3", "the larger tower"],
)
def test_logits_equal_the_reference(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = reference(make_checkpoint(tmp_path, TILED, **options))
    images = pixels(theirs, 3)
    net = load(theirs.folder)
    for ours, wanted in zip(encode(net, tensors(images)), theirs.embeddings(images), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    session = Session(net, prompt(theirs, 3), images, page_size=16)
    torch.testing.assert_close(session.prefill(7), theirs.logits(session.tokens, images), **LOGITS)


def tensors(images: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(image) for image in images]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_larger_tower(tmp_path: Path, size: int) -> None:
    """Its norms of queries and keys are over the heads of all ranks."""
    folder = make_checkpoint(tmp_path, TILED, vision=LARGER)
    canvas = torch.from_numpy(noise(3 * SIDE, SIDE))

    def run(shard: Shard) -> torch.Tensor:
        spec = load_spec(folder)
        net = load_net(spec, folder, dtype=torch.float32, device=CPU, shard=shard)
        return encode(net, [canvas])[0]

    whole = run(Shard(0, 1))
    for mine in together(run, shards(size)):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=0)


def test_tiles_are_encoded_alike_alone_in_company_and_in_graphs(
    checkpoint: Callable[..., Path],
) -> None:
    net = load(checkpoint(TILED))
    images = [torch.from_numpy(noise(tiles * SIDE, SIDE, seed=tiles)) for tiles in (3, 1, 7)]
    unit = net.spec.patch_unit
    positions = PositionCache(net.spec, net.vision, Metrics())
    config = EncoderConfig(graph_sizes=(4 * unit, 13 * unit))
    graphs = PackedEncoder(net, positions, config, torch.empty(0), eager)
    together = encode(net, images), graphs.encode(images, grids(net.spec, images))
    for i, image in enumerate(images):
        alone = encode(net, [image])[0]
        assert alone.shape == (net.spec.num_tokens(net.spec.sample.grid) * len(image) // SIDE, 64)
        for each in together:
            torch.testing.assert_close(each[i], alone, atol=1e-5, rtol=0.0)


@pytest.mark.more
def test_eight_requests_answer_as_transformers(tmp_path: Path) -> None:
    model = parity.load(TILED, tmp_path)
    harness = Harness(model.net, chunk_tokens=64)
    for _ in range(2):  # cold, then from the prefix cache
        parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))
    assert len(harness.encoded) == len(set(harness.encoded))


# ---- what cannot be


def changed(source: Path, folder: Path, file: str, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(data | fields))
    return folder


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer must be -1"),
        ("config.json", {"image_seq_length": 256}, "image_seq_length is 256, but a tile of 56"),
        ("config.json", {"text_config": {"model_type": "llama"}}, "'llama' is not supported"),
        ("preprocessor_config.json", {"size": {"height": 448}}, "height is 448, but .* for 56"),
        ("preprocessor_config.json", {"resample": 1}, "resample 1 is not supported"),
        ("tokenizer_config.json", {"extra_special_tokens": {"end_image_token": "<x>"}}, "'<x>'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(checkpoint(TILED), tmp_path / "model", file, **fields))


def test_the_family_has_no_options(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="patch_embed=folded: internvl has no options"):
        load_spec(checkpoint(TILED), ["patch_embed=folded"])
