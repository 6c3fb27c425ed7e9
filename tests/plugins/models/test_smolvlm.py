"""SmolVLM and Idefics3: how an image is cut, and chats without a template of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import CheckpointError
from saccade.families.kit import config_readers
from saccade.families.registry import load_spec
from saccade.plugins.models.smolvlm.spec import SmolVLMSpec
from saccade.text.prompt.template import ChatTemplate
from saccade.text.prompt.template import Tokenizer as TextTokenizer
from tests.families.conftest import Changed, Refusals, refusals_by_name
from tests.families.image_files import check_pixels
from tests.fixtures.tiny import Reference
from tests.fixtures.tiny import reference as load_reference

FAMILY = "idefics3"


@pytest.fixture(scope="module", params=[FAMILY, "smolvlm"])
def theirs(request: pytest.FixtureRequest, reference: Callable[..., Reference]) -> Reference:
    return reference(request.param)


@pytest.fixture(scope="module")
def spec(theirs: Reference) -> SmolVLMSpec:
    return read(theirs.folder)


def read(folder: Path) -> SmolVLMSpec:
    found = load_spec(folder)
    assert isinstance(found, SmolVLMSpec)
    return found


# ---- images


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
    changed: Changed, fields: dict[str, Any]
) -> None:
    folder = changed(FAMILY, "preprocessor_config.json", **fields)
    check_pixels(read(folder), load_reference(folder), 16)


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


# ---- files


def test_the_tokenizer_must_know_the_marks(
    changed: Changed, checkpoint: Callable[..., Path]
) -> None:
    folder = changed(FAMILY, "tokenizer.json")
    shutil.copy(checkpoint("qwen2_vl") / "tokenizer.json", folder)
    with pytest.raises(CheckpointError, match="has no <fake_token_around_image>"):
        load_spec(folder)


SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
REFUSED: Refusals = {
    "config.json": [
        ({"scale_factor": 3}, "image_size 56 must be a multiple of 3 patches of 14"),
        ({"text_config": {"model_type": "mistral"}}, "'mistral' is not supported"),
        ({"text_config": {"rope_parameters": SCALED}}, "rope type 'llama3' is not supported"),
        ({"model_type": "paligemma"}, "model_type"),
    ],
    "preprocessor_config.json": [
        (
            {"max_image_size": {"longest_edge": 364}},
            "longest_edge is 364, but the vision encoder requires 56",
        ),
        ({"size": {"longest_edge": 9000}}, "is 9000; it must be even"),
        ({"resample": 0}, "resample 0 is not supported"),
        ({"do_resize": False}, "do_resize false is not supported"),
    ],
}


test_what_is_not_supported_is_refused_by_name = refusals_by_name(FAMILY, REFUSED)
