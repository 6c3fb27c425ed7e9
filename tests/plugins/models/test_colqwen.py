"""ColQwen's vectors are transformers', in both published layouts, in chunks, on several ranks, and
beside PEFT's adapters. Other prompts and models are rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from saccade.core.errors import CheckpointError
from saccade.core.plan import Change, Plan
from saccade.core.types import NO_ADAPTER, AdapterRef, Caching, PromptReading, Request
from saccade.families.registry import load_spec
from tests.families.forwarding import load
from tests.fixtures.colqwen import (
    WIDTH,
    Base,
    ColQwenReference,
    Content,
    Layout,
    engine_name,
    make_colqwen,
)
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import picture
from tests.helpers.adapters import LANGUAGE, train

TOLERANCE = 1e-5
CONTENTS: tuple[Content, ...] = (
    *("how many red circles are there?", picture(64, 96)),
    *("a star", picture(90, 120, seed=1)),
)
EVERY = PromptReading(last=10**6)


@pytest.fixture(scope="module")
def colqwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    set_threads()

    @cache
    def make(base: Base, layout: Layout) -> ColQwenReference:
        return make_colqwen(tmp_path_factory.mktemp(base), base, layout)

    return make


def requests_of(
    harness: Harness, reference: ColQwenReference, adapter: AdapterRef = NO_ADAPTER
) -> list[Request]:
    made = []
    for index, content in enumerate(CONTENTS):
        shown = [harness.image(each, f"{index}") for each in reference.pixels(content)]
        tokens = reference.tokens(reference.prompt(content))
        request = harness.request(f"{index}{adapter.name}", tokens, shown, reading=EVERY)
        made.append(replace(request, caching=Caching(adapter=adapter)))
    return made


def check(outcomes: Mapping[str, Any], reference: ColQwenReference, adapter: str = "") -> None:
    for index, content in enumerate(CONTENTS):
        found = np.stack(outcomes[f"{index}{adapter}"].pooled_outputs)
        expected = reference.embedding(content)
        assert found.shape == expected.shape and expected.shape[1] == WIDTH
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("layout", ["transformers", "colpali-engine"])
@pytest.mark.parametrize("base", ["qwen2_vl", "qwen2_5_vl"])
def test_vectors_are_those_of_transformers(base: Base, layout: Layout, colqwen: Any) -> None:
    reference = colqwen(base, layout)
    harness = Harness(load(reference.folder), chunk_tokens=16)
    check(harness.run(requests_of(harness, reference)), reference)
    assert len(harness.encoded) == 2


def test_every_rank_projects(colqwen: Any) -> None:
    reference = colqwen("qwen2_vl", "transformers")
    group = ThreadRankGroup(reference.folder, 2, "data")
    harness = Harness(load(reference.folder), group, chunk_tokens=16)
    check(harness.run(requests_of(harness, reference)), reference)


@pytest.mark.parametrize("layout", ["transformers", "colpali-engine"])
def test_an_adapter_changes_vectors_but_no_image_is_encoded_again(
    layout: Layout, colqwen: Any, tmp_path: Path
) -> None:
    reference = colqwen("qwen2_vl", layout)
    modules = rf"{LANGUAGE}|embedding_proj_layer"
    trained = train(tmp_path, reference, 1, modules, r=4, lora_alpha=1)
    if layout == "colpali-engine":
        rename(tmp_path / "adapter_model.safetensors")
    harness = Harness(load(reference.folder))
    change = Change("load adapter", 1, str(tmp_path))
    loaded = harness.worker.execute(Plan(0, change=change)).changed
    assert loaded is not None and (loaded.error, loaded.tower) == ("", False)
    adapter = AdapterRef(1, loaded.fingerprint, loaded.tower, "search")
    requests = requests_of(harness, reference, adapter)
    outcomes = harness.run(requests_of(harness, reference) + requests)
    check(outcomes, reference)
    assert isinstance(trained.merged, ColQwenReference)
    check(outcomes, trained.merged, "search")
    both = (np.stack(outcomes[name].pooled_outputs) for name in ("1", "1search"))
    assert np.abs(np.subtract(*both)).max() > 0.1, "the adapter shows"
    assert len(harness.encoded) == 2


def rename(weights: Path) -> None:
    """Give an adapter's tensors the names that adapters of colpali-engine have."""
    start = "base_model.model."
    tensors = load_file(weights)
    save_file(
        {start + engine_name(name.removeprefix(start)): each for name, each in tensors.items()},
        weights,
    )


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("processor_config.json", {"query_prefix": "Search: "}, "query_prefix 'Search: ' is not"),
        ("processor_config.json", {"visual_prompt_prefix": "x"}, "visual_prompt_prefix 'x' is not"),
        ("config.json", {"vlm_config": {"model_type": "qwen3_vl"}}, "only Qwen2-VL and Qwen2.5-VL"),
        ("config.json", {"embedding_dim": 0}, "embedding_dim must be at least 1"),
        ("config.json", {"vlm_config": {"vision_config": {"in_channels": 1}}}, "in_channels 1"),
    ],
)
def test_what_is_not_supported_is_refused(
    file: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_colqwen(tmp_path).folder / file
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(_merged(data, fields)))
    with pytest.raises(CheckpointError, match=words):
        load_spec(tmp_path)


def _merged(data: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    changes = {
        name: _merged(data[name], value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return data | changes
