"""MiniCPM-V 4.7, whose images stand on a canvas of positions, and MiniCPM-OCR, whose processor
resizes as torch does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.types import Image, ImageKey
from saccade.families.registry import load_spec
from saccade.plugins.models.minicpm.positions import canvas_block
from saccade.plugins.models.minicpm.spec import CanvasSpec, MiniCPMSpec
from tests.families.answers import Case, Model
from tests.families.conftest import Changed, Refusals, Refused, listed
from tests.families.image_files import check_pixels
from tests.fixtures.families.minicpm import FINE, IMAGE, TOKENS
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import Reference, picture
from tests.fixtures.tiny import reference as load_reference

References = Callable[..., Reference]
CANVAS, PAGES = "minicpmv4_7", "minicpm_ocr"
AROUND = tuple(
    token
    for name, token in TOKENS.items()
    if name not in ("image_token", "video_token", "image_start_token")
)
WORDS = ("fox", "\n", "\n\n", " over", "\nred", *AROUND)
"""Between images: line ends and marks stand still behind one."""
SHAPES = [(60, 60), (100, 230), (300, 90), (20, 31), (700, 500), (30, 400), (48, 97), (10, 90)]


@pytest.fixture(scope="module")
def theirs(reference: References) -> Reference:
    return reference(CANVAS)


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> CanvasSpec:
    return read(theirs.folder)


@pytest.fixture(scope="module")
def model(answered: Callable[[str], Model]) -> Model:
    return answered(CANVAS)


def read(folder: Path, *options: str) -> CanvasSpec:
    found = load_spec(folder, options)
    assert isinstance(found, CanvasSpec)
    return found


def image_of(spec: MiniCPMSpec, size: tuple[int, int]) -> Image:
    grid = spec.recipe(*size, spec.pixel_bounds).grid
    return Image(ImageKey(b"", b""), grid, spec.num_tokens(grid), spec.num_patches(grid), size)


# ---- MiniCPM-V 4.7's positions


def check_positions(
    spec: CanvasSpec, theirs: Reference, text: str, shapes: list[tuple[int, int]]
) -> None:
    """Compare with transformers' own, of a prompt in which each image has its token."""
    tokenizer = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    images = [image_of(spec, shape) for shape in shapes]
    tokens, spans = spec.expand_prompt(tokenizer.encode(text).ids, images)
    blocks = [spec.image_positions(image.grid) for image in images]
    found, following = spec.positions(tokens, spans, blocks)
    views = []
    for grid in (image.grid for image in images):
        views += [grid[:2], *[grid[4:]] * (grid[2] * grid[3] if len(grid) > 2 else 0)]
    ids, merge = torch.tensor([tokens]), spec.images.merge
    types = (ids == theirs.mark).int()
    wanted, delta = theirs.model.model.get_rope_index(
        ids, types, torch.tensor(views) * merge, attention_mask=torch.ones_like(ids)
    )
    assert np.array_equal(found, wanted[:, 0].numpy()), (text, shapes)
    assert following == len(tokens) + int(delta)


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "not numbered"])
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_positions_are_the_references_whatever_stands_around_images(
    changed: Changed, numbered: bool, mode: str
) -> None:
    """Marks and ends of lines before, between and behind them too, and images side by side."""
    changed(CANVAS, "config.json", downsample_mode=mode)
    file = "preprocessor_config.json"
    folder = changed(CANVAS, file, use_image_id=numbered, downsample_mode=mode)
    theirs, spec, chance = load_reference(folder), read(folder), random.Random(0)
    for _ in range(150):
        shapes = chance.choices(SHAPES, k=chance.randint(1, 4))
        text = "".join(chance.choices(WORDS[:5], k=chance.randint(0, 2)))
        for _ in shapes:
            text += IMAGE + "".join(chance.choices(WORDS, k=chance.randint(0, 3)))
        check_positions(spec, theirs, text, shapes)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_whole_image_is_stretched_as_torch_does_it(
    rows: int, columns: int, down: int, across: int
) -> None:
    block = canvas_block((rows, columns, down, across, 5, 7))
    for axis, (count, length) in enumerate(((rows, 5 * down), (columns, 7 * across)), start=1):
        wanted = torch.linspace(0, length - 1, count).round().long()
        found = block[axis, : rows * columns].reshape(rows, columns)
        assert np.array_equal(found[:, 0] if axis == 1 else found[0], wanted.numpy())


def test_text_alone_counts_up_on_all_axes(spec: CanvasSpec) -> None:
    marks = sorted(spec.placeholder.own)
    positions, following = spec.positions([7, *marks, 8], (), ())
    assert np.array_equal(positions, np.tile(np.arange(len(marks) + 2), (3, 1)))
    assert following == len(marks) + 2


def test_the_mark_of_an_image_without_one_is_refused(spec: CanvasSpec) -> None:
    """Its keys would stand elsewhere with an image behind it, whose page they may share."""
    (mark,) = spec.placeholder.before
    for tokens in ((7, mark), (mark, 7), (*spec.placeholder.marks, mark)):
        images = [image_of(spec, (60, 60))] * (len(tokens) - 1 if 7 not in tokens else 0)
        with pytest.raises(InvalidRequest, match="no image follows"):
            spec.expand_prompt(tokens, images)


def test_a_line_end_that_an_answer_begins_with_stands_behind_the_image(model: Model) -> None:
    """That of a prompt stands still. A preempted answer, computed again, keeps its places."""
    (line,), scores = model.net.spec.placeholder.line, []  # type: ignore[attr-defined]
    case = Case("how many? @", ((112, 140),))
    for pages in (400, 100):
        harness = Harness(model.net, page_size=2, kv_pages=pages, chunk_tokens=16)
        requests = [
            harness.request(
                name,
                model.tokens(case),
                [harness.image(each, name) for each in model.pixels(case)],
                max_tokens=24,
                logit_bias=((line, 100.0),),
                logprobs=1,
            )
            for name in ("a", "b")
        ]
        outcomes = harness.run(requests)
        assert all(outcome.tokens == [line] * 24 for outcome in outcomes.values())
        scores.append([at.top for name in "ab" for at in outcomes[name].logprobs])
        assert (harness.scheduler.counts.preemptions > 0) == (pages == 100)
    for one, other in zip(*scores, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-3)


MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


@pytest.mark.whole
@pytest.mark.parametrize("name", MARKS)
def test_marks_that_are_not_the_tokenizers_are_refused(refused: Refused, name: str) -> None:
    refused(CANVAS, "config.json", f"{name} is 7, but the tokenizer's is", **{name: 7})
    refused(CANVAS, "config.json", f"{name} is missing", **{name: None})


@pytest.mark.parametrize(("line", "tokens"), [("", 0), ("ab", 2)])
def test_a_newline_of_no_or_several_tokens_is_refused(
    changed: Changed, line: str, tokens: int
) -> None:
    rule = {"type": "Replace", "pattern": {"String": "\n"}, "content": line}
    folder = changed(CANVAS, "tokenizer.json", normalizer=rule)
    with pytest.raises(CheckpointError, match=f"encodes a newline as {tokens} tokens"):
        load_spec(folder)


# ---- MiniCPM-OCR's images


@pytest.mark.parametrize(
    "fields",
    [
        {"small_image_upsize": "never"},
        {"small_image_upsize": "never", "slice_mode": False},
        {"max_slice_nums": 3, "scale_resolution": 90},
        {"downsample_mode": "16x"},
    ],
    ids=["small ones as they are", "no slices", "three of another size", "16x"],
)
def test_pixels_of_pages_are_the_references(
    changed: Changed, checkpoint: Callable[..., Path], fields: dict[str, Any]
) -> None:
    mode = fields.get("downsample_mode", "4x")
    changed(PAGES, "config.json", downsample_mode=mode)
    folder = changed(PAGES, "preprocessor_config.json", **fields)
    spec = load_spec(folder)
    assert isinstance(spec, MiniCPMSpec)
    check_pixels(spec, load_reference(folder))
    if "small_image_upsize" in fields:
        small, usual = (
            each.recipe(9, 17, each.pixel_bounds) for each in (spec, load_spec(checkpoint(PAGES)))
        )
        assert small.canvas == (8, 16) and small.canvas != usual.canvas
        assert spec.settings(small) != spec.settings(usual)


def test_small_images_that_stay_as_they_are_are_no_larger_than_others(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    spec = load_spec(changed(PAGES, "preprocessor_config.json", small_image_upsize="never"))
    usual, chance = load_spec(checkpoint(PAGES)), random.Random(1)
    for _ in range(2000):
        size = chance.randint(1, 40), chance.randint(1, 400)
        if max(size) > 200 * min(size):
            continue
        few, many = (each.recipe(*size, each.pixel_bounds).grid for each in (spec, usual))
        assert spec.num_tokens(few) <= usual.num_tokens(many)


def test_what_a_file_leaves_out_is_of_pages(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    folder = changed(PAGES, "preprocessor_config.json")
    written = json.loads((folder / "preprocessor_config.json").read_text())
    for name in ("downsample_mode", "image_processor_type"):
        del written[name]
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    assert load_spec(folder) == load_spec(checkpoint(PAGES))
    assert written.keys().isdisjoint(FINE)


REFUSED: Refusals = {
    "config.json": [
        ({"vision_config": {"model_type": "minicpmv4_6_vision"}}, "'minicpmv4_6_vision' is not"),
        ({"downsample_mode": "16x"}, "downsample_mode is 4x, but it is 16x in config"),
        ({"model_type": "minicpmv5"}, "model_type 'minicpmv5' is not supported"),
    ],
    "preprocessor_config.json": [
        ({"small_image_upsize": "adaptive"}, "small_image_upsize 'adaptive' is not supported"),
        ({"resample": 0}, "resample 0 is not supported"),
    ],
}


@pytest.mark.whole
@pytest.mark.parametrize(("file", "fields", "words"), listed(REFUSED))
def test_what_is_not_supported_is_refused_by_name(
    refused: Refused, file: str, fields: dict[str, Any], words: str
) -> None:
    refused(PAGES, file, words, **fields)


def test_an_image_of_a_page_is_the_same_at_any_place(answered: Callable[[str], Model]) -> None:
    model = answered(PAGES)
    harness = Harness(model.net, chunk_tokens=64)
    for name, text in (("alone", "@ how many?"), ("later", "the quick @ fox")):
        shown = [model.reference.resize(picture(112, 140, seed=2))]
        tokens = model.tokens(Case(text))
        request = harness.request(name, tokens, [harness.image(shown[0], "A")], max_tokens=8)
        wanted = model.reference.generate(request.tokens, shown, max_new_tokens=8)
        assert harness.run([request])[name].tokens == wanted
    assert len(harness.encoded) == 1
