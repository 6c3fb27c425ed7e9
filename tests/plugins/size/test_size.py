"""`saccade size`: a table or JSON, what fits into a memory, and models on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from saccade.commands import app
from saccade.core.config import GIB, MIB
from saccade.core.errors import CheckpointError, ConfigError
from saccade.plugins.size import hub
from saccade.plugins.size.report import ModelSize, SizeInput, as_data, measure


def run(*words: str) -> int:
    status = app(["size", *words], result_action="return_value")
    assert isinstance(status, int)
    return status


def test_a_table_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--memory", "2GiB", "--device", "cpu") == 0
    said = capsys.readouterr().out
    for name in ("weights: vision tower", "KV cache", "work: an image", "total"):
        assert name in said
    assert "It fits into 2.0 GiB: a context of 32768 tokens" in said


def test_json_has_the_same_sizes_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--memory", "2GiB", "--device", "cpu", "--tokens", "100", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line for line in data["lines"]}
    assert data["memory_bytes"] == 2 * GIB
    assert lines["KV cache"]["needed"] == 112 * data["kv_token_bytes"], "whole pages"
    assert data["needed_bytes"] == sum(line["needed"] for line in lines.values())
    assert all(line["full"] >= line["needed"] > 0 for line in lines.values())


def test_the_status_says_that_a_model_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--memory", "300MiB", "--device", "cpu") == 1
    assert "It does not fit into 0.3 GiB: no memory for the KV cache" in capsys.readouterr().out


def sized(model: str | Path, **options: object) -> ModelSize:
    return measure(SizeInput(str(model), device="cpu", **options))  # type: ignore[arg-type]


def test_more_memory_holds_more_tokens_up_to_those_of_all_requests() -> None:
    found = [sized("demo", memory=size) for size in ("512MiB", "1GiB", "64GiB", "128GiB")]
    tokens = [each.estimate.config.kv_tokens for each in found if each.estimate.config]
    assert tokens[0] < tokens[1] < tokens[2] == tokens[3]


def test_options_change_what_they_change_in_a_server() -> None:
    plain, small = (
        sized("demo", memory="4GiB"),
        sized("demo", memory="4GiB", limits=(1024, 2, 4096)),
    )
    assert small.estimate.config is not None
    assert small.estimate.config.context_length == 1024
    assert small.estimate.config.kv_tokens == 4096
    eight = sized("demo", memory="4GiB", bits=("auto", "none", "fp8_e4m3"))
    assert 2 * eight.estimate.kv_token_bytes == plain.estimate.kv_token_bytes


def test_a_model_with_states_has_a_line_for_them(checkpoint: Callable[..., Path]) -> None:
    found = sized(checkpoint("qwen3_5"), memory="4GiB")
    names = [line.name for line in found.estimate.lines]
    assert "states" in names and found.estimate.state_bytes > 0


def test_a_gpu_that_is_not_here_is_sized_by_its_memory() -> None:
    found = measure(SizeInput("demo", "24GiB", device="cuda"))
    assert found.fits and "work and graphs" in [line.name for line in found.estimate.lines]
    assert as_data(found)["device"] == "cuda"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"memory": "24"}, "--memory = '24': write a size"),
        ({"memory": "0GiB"}, "--memory = '0GiB': write a size"),
        ({"tokens": 0}, "--tokens 0: must be from 1 to 32768"),
        ({"tokens": 10**6}, "--tokens 1000000: must be from 1 to 32768"),
        ({"limits": (10**6, None, None)}, "--context-length 1000000"),
    ],
)
def test_options_that_no_server_has_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sized("demo", **options)
    assert why in str(caught.value)


def test_a_gpu_that_is_not_here_needs_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU: set --memory"):
        measure(SizeInput("demo", device="cuda"))


# ---- the hub


@pytest.fixture
def on_hub(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub with one model, some/model: its files but the weights, and these files' headers."""
    folder = checkpoint("qwen3_vl")

    def snapshot_download(repo: str, *, local_dir: Path, allow_patterns: list[str], **_: object):  # type: ignore[no-untyped-def]
        assert repo == "some/model" and "*.safetensors" not in allow_patterns
        for path in folder.glob("*.json"):
            (local_dir / path.name).write_bytes(path.read_bytes())

    class HfApi:
        def get_safetensors_metadata(self, _repo: str, **_: object) -> object:
            return SimpleNamespace(
                files_metadata={path.name: described(path) for path in folder.glob("*.safetensors")}
            )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    return folder


def described(path: Path) -> object:
    """What the hub's client reads from a file's head."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return SimpleNamespace(tensors={name: SimpleNamespace(**each) for name, each in header.items()})


def test_a_hubs_model_has_the_sizes_of_its_folder(on_hub: Path) -> None:
    there, here = sized("some/model", memory="4GiB"), sized(on_hub, memory="4GiB")
    assert there.estimate == here.estimate


def test_headers_of_a_hubs_weights_take_no_space(on_hub: Path) -> None:
    with hub.described_folder("some/model", None, None) as folder:
        weights = folder / "model.safetensors"
        assert weights.stat().st_size >= (on_hub / "model.safetensors").stat().st_size - 4096
        assert weights.stat().st_blocks * 512 < MIB // 4
    assert not folder.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/b", ".."])
def test_a_hubs_index_names_files_of_its_folder_alone(
    on_hub: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = described(on_hub / "model.safetensors")
    found = SimpleNamespace(files_metadata={name: file})
    written: list[Path] = []
    monkeypatch.setattr(hub, "write_header", lambda path, _: written.append(path))
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda *_, **__: found)
    with pytest.raises(CheckpointError, match="outside its folder"):
        sized("some/model", memory="4GiB")
    assert not written


def test_a_hubs_gguf_files_are_not_fetched() -> None:
    with pytest.raises(CheckpointError, match="download the file"):
        sized("some/model-GGUF:Q4_K_M")
