"""A folder that is not what it should be: the error names file and field, and says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import CheckpointError
from saccade.core.model_folder import resolve_model
from saccade.families.registry import load_spec, resolve_checkpoint
from saccade_bench.lab.qwen import qwen


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a good folder, to be spoilt."""
    return Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_folder_is_itself(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-thing", "no directory 'no-such-thing'"),
        ("./a/b", "no directory"),
        ("a/b/c", "no directory"),
        ("{folder}/config.json", "is a file"),
        ("{folder}/empty", "no config.json"),
    ],
)
def test_what_is_no_model_is_said_to_be_none(folder: Path, model: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match=message):
        resolve_model(model.format(folder=folder))


@pytest.mark.parametrize("model", ["demo", "{folder}", "{folder}/model.Q4_K_M.gguf"])
def test_what_is_on_this_machine_has_no_revision(folder: Path, model: str) -> None:
    (folder / "model.Q4_K_M.gguf").touch()
    with pytest.raises(CheckpointError, match=r"--revision v2: .* is on this machine"):
        resolve_checkpoint(model.format(folder=folder), "v2")


def test_a_hub_id_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"cannot download saccade-tests/absent.*pass its directory"
    ) as refused:
        resolve_model("saccade-tests/absent")
    assert len(str(refused.value).splitlines()) == 1


def test_an_unknown_architecture_lists_the_known_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder / "config.json", lambda data: data.update(architectures=["LlamaForCausalLM"]))
    monkeypatch.setattr("saccade.families.registry.find_spec", lambda _: None)
    with pytest.raises(
        CheckpointError,
        match=r"LlamaForCausalLM is not supported \(supported: .*Qwen2VL.*Qwen3VL.*\[transformers",
    ):
        load_spec(folder)


@pytest.mark.more
def test_an_architecture_that_transformers_does_not_know_is_refused_by_name(folder: Path) -> None:
    edit(folder / "config.json", lambda data: data.update(architectures=["NobodysForCausalLM"]))
    with pytest.raises(
        CheckpointError, match=r"config\.json: NobodysForCausalLM is not a model for text"
    ):
        load_spec(folder)


def test_model_type_stands_in_for_architectures(folder: Path) -> None:
    edit(folder / "config.json", lambda data: data.pop("architectures"))
    assert load_spec(folder).family == "qwen3_vl"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["text_config"].pop("hidden_size"),
            "config.json: text_config: hidden_size is missing",
        ),
        (
            lambda data: data["text_config"].update(num_hidden_layers="many"),
            "num_hidden_layers must be an integer, not 'many'",
        ),
        (
            lambda data: data["text_config"].update(num_key_value_heads=3),
            "4 query heads cannot share 3",
        ),
        (
            lambda data: data["text_config"]["rope_parameters"].update(rope_type="yarn"),
            "rope type 'yarn' is not supported",
        ),
        (
            lambda data: data["text_config"]["rope_parameters"].update(mrope_section=[1, 2, 3]),
            r"mrope_section \[1, 2, 3\].*sum to 8",
        ),
        (
            lambda data: data["vision_config"].update(deepstack_visual_indexes=[9]),
            "deepstack_visual_indexes",
        ),
        (
            lambda data: data["vision_config"].update(out_hidden_size=65),
            "output has 65 values, but the language model expects 64",
        ),
        (lambda data: data.update(vision_config=3), "vision_config must be an object"),
    ],
)
def test_a_wrong_field_is_named(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=message):
        load_spec(folder)


def test_damaged_and_missing_files_are_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        load_spec(folder)
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is damaged: maximum recursion"):
        load_spec(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_spec(folder)


def test_the_processor_must_fit_the_tower(folder: Path) -> None:
    edit(folder / "preprocessor_config.json", lambda data: data.update(patch_size=14))
    with pytest.raises(
        CheckpointError,
        match=r"preprocessor_config\.json: patch_size is 14, but the vision encoder requires 16",
    ):
        load_spec(folder)


@pytest.mark.parametrize(
    ("processor", "limits"),
    [
        ({"min_pixels": 100, "max_pixels": 2000}, (100, 2000)),
        ({"size": {"shortest_edge": 100, "longest_edge": 2000}}, (100, 2000)),
        ({"size": {"min_pixels": 100, "max_pixels": 2000}}, (100, 2000)),
        (
            {
                "size": {"shortest_edge": 1, "longest_edge": 2},
                "min_pixels": 100,
                "max_pixels": 2000,
            },
            (100, 2000),
        ),
        ({"min_pixels": None, "size": {"shortest_edge": 100, "longest_edge": 2000}}, (100, 2000)),
        ({}, (65536, 16777216)),
    ],
)
def test_pixel_limits_from_every_layout(
    folder: Path, processor: dict[str, Any], limits: tuple[int, int]
) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    rules = qwen(load_spec(folder)).images
    assert (rules.min_pixels, rules.max_pixels) == limits


def test_pixel_limits_from_a_processor_file_of_transformers_5(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": {"size": {"shortest_edge": 7, "longest_edge": 70}}})
    )
    assert qwen(load_spec(folder)).images.max_pixels == 70


def test_end_tokens_come_from_generation_config_first(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7}))
    assert load_spec(folder).eos_token_ids == (7,)
    path.write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_spec(folder).eos_token_ids == (7, 8)


def test_without_generation_config_the_tokenizers_end_token_counts_too(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    end = next(int(number) for number, entry in added.items() if entry["content"] == "<|im_end|>")
    edit(folder / "config.json", lambda data: data["text_config"].update(eos_token_id=3))
    assert load_spec(folder).eos_token_ids == (3, end)
