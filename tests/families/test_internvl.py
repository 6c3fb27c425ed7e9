"""InternVL: the grid of tiles is transformers', and ranks share the larger tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from saccade.families.internvl.images import TileRules, tile_grid
from saccade.families.internvl.spec import InternVLSpec
from saccade.families.internvl.tiny import LARGER, MOST_TILES, SIDE
from saccade.families.registry import load_spec
from saccade.parallel import Shard
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.fixtures.rank_group import shards, together
from tests.families.conftest import Refusals, Refused, listed
from tests.families.forwarding import CPU, encode
from tests.media.pictures import noise

FAMILY = "internvl"


@pytest.fixture(scope="module")
def spec(checkpoint: Callable[..., Path]) -> InternVLSpec:
    found = load_spec(checkpoint(FAMILY))
    assert isinstance(found, InternVLSpec)
    return found


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
    rules = TileRules(side, *bounds, (half, half), "bicubic", tokens=4, patch_unit=17)
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


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_larger_tower(checkpoint: Callable[..., Path], size: int) -> None:
    """Its norms of queries and keys are over the heads of all ranks."""
    folder = checkpoint(FAMILY, vision=LARGER)
    canvas = torch.from_numpy(noise(3 * SIDE, SIDE))

    def run(shard: Shard) -> torch.Tensor:
        spec = load_spec(folder)
        net = load_net(spec, folder, dtype=torch.float32, device=CPU, shard=shard)
        return encode(net, [canvas])[0]

    whole = run(Shard(0, 1))
    for mine in together(run, shards(size)):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=0)


REFUSED: Refusals = {
    "config.json": [
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1"),
        ({"image_seq_length": 256}, "image_seq_length is 256, but a tile of 56"),
        ({"text_config": {"model_type": "llama"}}, "'llama' is not supported"),
        *(({"downsample_ratio": value}, "downsample_ratio") for value in (0, -1, 2, 1e-320)),
    ],
    "preprocessor_config.json": [
        ({"size": {"height": 448}}, "height is 448, but .* for 56"),
        ({"resample": 1}, "resample 1 is not supported"),
        ({"max_patches": 10**9}, "max_patches"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
    ],
    "tokenizer_config.json": [({"extra_special_tokens": {"end_image_token": "<x>"}}, "'<x>'")],
}


@pytest.mark.whole
@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_supported_is_refused_by_name(
    refused: Refused, file: str, fields: dict[str, Any], words: str
) -> None:
    refused(FAMILY, file, words, **fields)
