"""HunyuanOCR's own: positions on four axes, an image's size, and what is not served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import smart_resize

from saccade.core.errors import CheckpointError, ImageError
from saccade.families.hunyuan_vl.images import LineRules
from saccade.families.hunyuan_vl.spec import HunyuanSpec
from saccade.families.hunyuan_vl.vision import lines
from saccade.families.kit.config_readers import HALF
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.fixtures.tiny import Reference, tinies
from tests.families.conftest import Changed, listed
from tests.families.forwarding import CPU, Session, images_of, load, pixels, prompt

FAMILY = "hunyuan_vl"
PAIRS = {"rope_axes": "pairs"}
HUB = LineRules(16, 2, 512 * 512, 2048 * 2048, HALF, HALF, temporal_patch=1)
SIDES = st.integers(1, 9000)


def read(folder: Path) -> HunyuanSpec:
    found = load_spec(folder)
    assert isinstance(found, HunyuanSpec)
    return found


@settings(deadline=None)
@given(SIDES, SIDES)
def test_sizes_are_the_references(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="200"):
            HUB.recipe(height, width, HUB.pixel_bounds)
        return
    recipe = HUB.recipe(height, width, HUB.pixel_bounds)
    tall, wide = smart_resize(height, width, 32, 512 * 512, 2048 * 2048)
    assert recipe.canvas == (tall, wide) and recipe.plain
    assert recipe.grid == (1, tall // 16, wide // 16)
    tokens = tall // 32 * (wide // 32 + 1) + 2
    assert HUB.num_tokens(recipe.grid) == tokens <= HUB.largest_image.tokens


@pytest.mark.parametrize("variant", ["as it is", "an axis less"])
def test_positions_are_the_references(reference: Callable[..., Reference], variant: str) -> None:
    theirs = reference(FAMILY, **tinies()[FAMILY].variants[variant])
    spec, pictures = read(theirs.folder), pixels(theirs, 3)
    images = images_of(spec, pictures)
    tokens, spans = spec.expand_prompt(prompt(theirs, 3), images)
    blocks = [spec.image_positions(image.grid) for image in images]
    found, following = spec.positions(tokens, spans, blocks)
    ids = torch.tensor([tokens])
    kinds = (ids == theirs.mark).int()
    wanted, delta = theirs.model.model.get_rope_index(
        ids, kinds, torch.tensor([image.grid for image in images])
    )
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert following == len(tokens) + int(delta)
    assert {*found[-1, found[0] != found[-1]]} == {0, 1, 2}, "each image has its number"


def test_an_image_is_known_by_its_number(reference: Callable[..., Reference]) -> None:
    """The second of two equal images is not the first."""
    theirs = reference(FAMILY)
    net, (shown,) = load(theirs.folder), pixels(theirs, 1)
    session = Session(net, prompt(theirs, 2), [shown, shown], 16)
    wanted = theirs.logits(session.tokens, [shown, shown])
    torch.testing.assert_close(session.prefill(7), wanted, atol=2e-4, rtol=0.0)


class PairedAxes:
    """Joins frequencies [axes, 1, T, D / 2] as llama.cpp does: a section of pairs is one axis."""

    def __init__(self, sections: Sequence[int]) -> None:
        self.sections = list(sections)

    def __call__(self, freq: torch.Tensor) -> torch.Tensor:
        parts = freq.split(self.sections, dim=-1)
        joined = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return torch.cat((joined, joined), dim=-1)


def _load(spec: HunyuanSpec, folder: Path, options: dict[str, str]) -> FamilyNet:
    return load_net(spec.with_options(options), folder, dtype=torch.float32, device=CPU)


def test_axes_of_pairs_are_an_option(
    reference: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all axes are alike, as in text, both ways are the same."""
    theirs = reference(FAMILY)
    spec = read(theirs.folder)
    usual, paired = (_load(spec, theirs.folder, each) for each in ({}, PAIRS))
    texts = [Session(net, prompt(theirs, 0), [], 16).prefill() for net in (usual, paired)]
    torch.testing.assert_close(*texts, atol=2e-4, rtol=0.0)
    session = Session(paired, prompt(theirs, 1), pixels(theirs, 1), 16)
    rope = theirs.model.model.language_model.rotary_emb
    own = theirs.logits(session.tokens, pixels(theirs, 1))
    monkeypatch.setattr(rope, "recomposition_frequencies", PairedAxes(rope.mrope_section))
    wanted = theirs.logits(session.tokens, pixels(theirs, 1))
    torch.testing.assert_close(session.prefill(7), wanted, atol=2e-4, rtol=0.0)
    assert (own - wanted).abs().max() > 0.01, "the ways differ for images"


def test_lines_end_in_marks() -> None:
    assert lines(2, 3).tolist() == [7, 0, 1, 2, 6, 3, 4, 5, 6, 8]


def test_names_of_the_hub_say_the_same(checkpoint: Callable[..., Path]) -> None:
    new, old = (read(checkpoint(FAMILY, tie=True, layout=each)) for each in ("new", "old"))
    assert new == old and new.position_axes == 4


def test_bounds_stand_in_a_size_by_either_name(changed: Changed) -> None:
    found = []
    for names in (("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels")):
        size = dict(zip(names, (1024, 4096)))
        whole = dict.fromkeys(("shortest_edge", "longest_edge")) | size
        spec = read(changed(FAMILY, "preprocessor_config.json", size=whole))
        found.append((spec.images.min_pixels, spec.images.max_pixels))
    assert found == [(1024, 4096)] * 2


REFUSED = {
    "config.json": (
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, "alpha is missing"),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
            "three whole numbers or more that sum to 8",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 1.5]}}},
            "three whole numbers or more that sum to 8",
        ),
        ({"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "'yarn' is not supported"),
        ({"text_config": {"use_qk_norm": False}}, "use_qk_norm false"),
        ({"text_config": {"attention_bias": True}}, "attention_bias"),
        ({"vision_config": {"interpolate_mode": "nearest"}}, "interpolate_mode 'nearest'"),
        ({"vision_config": {"temporal_patch_size": 2}}, "temporal_patch_size must be 1"),
        ({"vision_config": {"max_image_size": 7}}, "max_image_size 7 is less than a patch"),
        ({"vision_config": {"num_key_value_heads": 2}}, "num_key_value_heads must be 4"),
        ({"image_token_id": 600}, "beyond the vocabulary"),
    ),
    "preprocessor_config.json": (({"merge_size": 4}, "merge_size is 4"),),
}


@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_served_is_refused_by_name(
    changed: Changed, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(FAMILY, file, **fields))
