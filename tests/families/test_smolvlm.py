"""SmolVLM and Idefics3: an image is cut up as transformers does it, pixel for pixel, and said in
the prompt in its words; an image's tiles are spans, whatever page, chunk or rank they fall in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError, ConfigError, InvalidRequest
from saccade.core.types import Grid, Image, ImageKey
from saccade.families import config_readers
from saccade.families.registry import load_spec
from saccade.families.smolvlm.spec import SmolVLMSpec
from saccade.media.decode import decode_into
from saccade.media.header import probe
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from saccade_bench.fixtures.crew import ThreadCrew
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.tiny import Reference, make_checkpoint, picture, reference
from tests.engine import test_parity as parity
from tests.families.forwarding import Session, encode, load
from tests.families.test_internvl import files
from tests.families.test_parity import LOGITS, pixels, prompt
from tests.media.pictures import decoded
from tests.parallel.test_parity import ASKED, check_crew

TYPES: tuple[str, ...] = ("idefics3", "smolvlm")


@pytest.fixture(scope="module", params=TYPES)
def theirs(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Reference:
    return reference(checkpoint(request.param))


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> SmolVLMSpec:
    return read(theirs.folder)


def read(folder: Path) -> SmolVLMSpec:
    found = load_spec(folder)
    assert isinstance(found, SmolVLMSpec)
    return found


def canvas_of(spec: SmolVLMSpec, data: bytes) -> np.ndarray:
    header = probe(data, max_pixels=10**8)
    recipe = spec.recipe(*header.upright, spec.pixel_bounds)
    canvas = np.full((*recipe.canvas, 3), 7, np.uint8)
    decode_into([(canvas, recipe)], memoryview(data), header.upright, header.orientation)
    assert recipe.grid == spec.images.grid(*recipe.canvas)
    return canvas


# ---- images


@pytest.mark.more
def test_pixels_are_the_references(spec: SmolVLMSpec, theirs: Reference) -> None:
    seen = set()
    for data in files():
        canvas = canvas_of(spec, data)
        np.testing.assert_array_equal(canvas, theirs.resize(decoded(data)))
        seen.add(spec.images.grid(*canvas.shape[:2]))
    assert {(3, 3), (1, 3), (3, 1), (2, 3), (3, 2)} <= seen


@pytest.mark.more
@pytest.mark.parametrize(
    "fields",
    [
        {"do_image_splitting": False},
        {"size": {"longest_edge": 40}},
        {"size": {"longest_edge": 112}},
    ],
    ids=["in one", "smaller than a tile", "two across"],
)
def test_pixels_of_other_settings_are_the_references(
    checkpoint: Callable[..., Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = changed(checkpoint("idefics3"), tmp_path / "m", "preprocessor_config.json", **fields)
    theirs, spec = reference(folder), read(folder)
    for data in files()[:16]:
        np.testing.assert_array_equal(canvas_of(spec, data), theirs.resize(decoded(data)))


def test_lanczos_is_bicubic_beside_an_older_pytorch(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers, whose torchvision cannot do it there."""
    folder, found = checkpoint("smolvlm"), list[str]()
    for release in ((2, 11), (2, 12), (3, 0)):
        monkeypatch.setattr(config_readers, "_torch_release", lambda now=release: now)
        spec = read(folder)
        found.append(spec.recipe(64, 96, spec.pixel_bounds).resample)
    assert found == ["bicubic", "lanczos", "lanczos"]


def test_a_request_may_ask_for_fewer_tiles(spec: SmolVLMSpec) -> None:
    tile, bounds = spec.images.side**2, spec.pixel_bounds
    assert (bounds.least, bounds.max_pixels) == (tile, 9 * tile)
    found = []
    for most in (9 * tile, 6 * tile, 4 * tile, 2 * tile, 1):
        recipe = spec.recipe(300, 300, replace(bounds, max_pixels=most))
        found.append((recipe.grid, spec.settings(recipe)))
    assert [grid for grid, _ in found] == [(3, 3), (2, 2), (2, 2), (0, 0), (0, 0)]
    assert len({settings for _, settings in found}) == 3
    largest = spec.largest_image
    assert (largest.pixels, largest.tokens) == (12 * tile, 40)


# ---- prompts


def image_of(spec: SmolVLMSpec, grid: Grid) -> Image:
    return Image(ImageKey(b"", b""), grid, spec.num_tokens(grid), spec.num_patches(grid), (1, 1))


def test_prompts_are_expanded_as_the_reference_does_it(
    spec: SmolVLMSpec, theirs: Reference
) -> None:
    shown = [
        theirs.resize(picture(*size, seed=i))
        for i, size in enumerate([(60, 60), (100, 230), (300, 90)])
    ]
    words = "one <image>\ntwo <image><image> three?"
    tokenizer = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    wanted = tokenizer.encode(theirs.expand(words, shown)).ids
    assert "\n\n" in theirs.expand(words, shown)
    tokens = tokenizer.encode(words).ids
    images = [image_of(spec, spec.images.grid(*canvas.shape[:2])) for canvas in shown]
    expanded, spans = spec.expand_prompt(tokens, images)
    assert list(expanded) == wanted
    for number, image in enumerate(images):
        mine = [span for span in spans if span.image == number]
        assert [span.offset for span in mine] == list(range(0, image.num_tokens, 4))
        assert {token for span in mine for token in expanded[span.start : span.end]} == {
            spec.placeholder.marks[0]
        }
    for at, token in enumerate(tokens, 1):
        end = spec.widened(at, spans, images)
        if token == spec.placeholder.marks[0]:
            assert expanded[:end][-1:] == spec.placeholder.after
        else:
            assert expanded[end - 1] == token
    with pytest.raises(InvalidRequest, match="3 image placeholders for 2 images"):
        spec.expand_prompt(tokens, images[:2])


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
    {"role": "assistant", "content": "a circle"},
    {"role": "user", "content": "which colour?"},
]
WRITTEN = (
    "<|im_start|>System: be brief<end_of_utterance>\nUser:<image>what?<end_of_utterance>\n"
    "Assistant: a circle<end_of_utterance>\nUser: which colour?<end_of_utterance>\nAssistant:"
)


@pytest.mark.parametrize("own", [True, False], ids=["the checkpoint's", "the family's"])
def test_templates_that_read_parts_alone_lose_no_text(
    spec: SmolVLMSpec, theirs: Reference, tmp_path: Path, own: bool
) -> None:
    folder = shutil.copytree(theirs.folder, tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if not own:
        settings.pop("chat_template")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate.load(folder, TextTokenizer.load(folder), None, spec.templates)
    assert any("no template of their own" in source for source in template.sources) != own
    assert template.render(CHAT) == WRITTEN


# ---- the network


@pytest.mark.first
@pytest.mark.parametrize("family", TYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "old"}, {"tie": True}, {"text": {"head_dim": 24}}],
    ids=["as it is", "old", "tied", "heads of their own size"],
)
def test_logits_equal_the_reference(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    theirs = reference(make_checkpoint(tmp_path, family, **options))
    images = pixels(theirs, 3)
    net = load(theirs.folder)
    tensors = [torch.from_numpy(image) for image in images]
    for ours, wanted in zip(encode(net, tensors), theirs.embeddings(images), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0.0)
    session = Session(net, prompt(theirs, 3), images, page_size=16)
    torch.testing.assert_close(session.prefill(7), theirs.logits(session.tokens, images), **LOGITS)


@pytest.mark.more
@pytest.mark.parametrize("family", TYPES)
def test_eight_requests_answer_as_transformers(tmp_path: Path, family: str) -> None:
    model = parity.load(family, tmp_path)
    harness = Harness(model.net, chunk_tokens=64)
    for _ in range(2):  # cold, then from the prefix cache
        parity.check(model, harness.run([model.request(harness, name) for name in parity.CASES]))
    assert len(harness.encoded) == len(set(harness.encoded))


@pytest.mark.more
def test_two_ranks_answer_as_transformers(tmp_path: Path) -> None:
    model = parity.load("smolvlm", tmp_path)
    assert set(ASKED) <= set(model.answers)
    check_crew(model, ThreadCrew(tmp_path, 2, "weights"))


# ---- what cannot be


def changed(source: Path, folder: Path, file: str, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(data | fields))
    return folder


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"scale_factor": 3}, "image_size 56 is no multiple of 3 patches of 14"),
        ("config.json", {"text_config": {"model_type": "mistral"}}, "'mistral' is not supported"),
        (
            "preprocessor_config.json",
            {"max_image_size": {"longest_edge": 364}},
            "longest_edge is 364, but the vision tower was made for 56",
        ),
        ("preprocessor_config.json", {"size": {"longest_edge": 9000}}, "is 9000, but must be even"),
        ("preprocessor_config.json", {"resample": 0}, "resample 0 is not supported"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize false is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_spec(changed(checkpoint("idefics3"), tmp_path / "model", file, **fields))


def test_scaled_rotary_embeddings_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    text = json.loads((checkpoint("idefics3") / "config.json").read_text())["text_config"]
    text |= {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}
    folder = changed(checkpoint("idefics3"), tmp_path / "m", "config.json", text_config=text)
    with pytest.raises(CheckpointError, match="rope type 'llama3' is not supported"):
        load_spec(folder)


def test_the_tokenizer_must_know_the_marks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = changed(checkpoint("idefics3"), tmp_path / "m", "tokenizer.json")
    shutil.copy(checkpoint("qwen2_vl") / "tokenizer.json", folder)
    with pytest.raises(CheckpointError, match="has no <fake_token_around_image>"):
        load_spec(folder)


def test_the_family_has_no_options(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="patch_embed=folded: smolvlm has no options"):
        load_spec(checkpoint("smolvlm"), ["patch_embed=folded"])
