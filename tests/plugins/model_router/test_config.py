"""The file of models: what it may say, and how a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.core.errors import ConfigError
from saccade.plugins.model_router.config import (
    MAX_MODELS,
    PROCESS_BYTES,
    ModelConfig,
    ModelsConfig,
    estimated_bytes,
    read_models,
)
from saccade.plugins.route.options import RouteOptions

WHOLE = """
memory = "40GiB"
idle = "never"
stay = "1.5m"
patience = "2h"
queue = 3
max-waiting = 7
api-keys-file = "keys"
args = ["--threads", "2"]
[qwen]
model = "Qwen/Qwen3-VL-2B-Instruct"
args = ["--quantization", "int8", "--lora", "poet=/adapters/poet", "--lora=cook=/adapters/cook"]
aliases = ["gpt-4o", "vision/large"]
memory = "500MiB"
[demo]
model = "demo"
"""


def read(text: str, folder: Path) -> ModelsConfig:
    file = folder / "models.toml"
    file.write_text(text)
    return read_models(str(file))


def test_every_field_is_read(tmp_path: Path) -> None:
    config = read(WHOLE, tmp_path)
    qwen, demo = config.models
    rest = (40 << 30, None, 90.0, 7200.0, 3, 7, "keys")
    assert config == ModelsConfig((qwen, demo), *rest)
    assert qwen.names == ("qwen", "gpt-4o", "vision/large", "poet", "cook")
    assert qwen.memory == 500 << 20
    assert qwen.serve_options[:4] == ["--threads", "2", "--quantization", "int8"]
    names = [*("--served-model-name", "qwen"), *("--served-model-name", "gpt-4o")]
    assert qwen.serve_options[-6:] == [*names, "--served-model-name", "vision/large"]
    assert demo == ModelConfig("demo", "demo", ("--threads", "2"))


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    assert read('[a]\nmodel = "demo"', tmp_path) == ModelsConfig((ModelConfig("a", "demo"),))


MODEL = '[a]\nmodel = "demo"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not 0"),
        ("".join(f'[a{n}]\nmodel = "demo"\n' for n in range(MAX_MODELS + 1)), "not 65"),
        ("[a", "Expected"),
        ("[a]\n", "`model`"),
        ('memori = "1GiB"\n' + MODEL, "memori"),
        (MODEL + "size = 3", r"\[a\] .*size"),
        (MODEL + "args = 3", r"\[a\] .*args"),
        ('memory = "1"\n' + MODEL, '"40GiB"'),
        ('memory = "0GiB"\n' + MODEL, '"40GiB"'),
        ('idle = "soon"\n' + MODEL, r'idle = .*"10m"'),
        ("queue = 0\n" + MODEL, "at least 1"),
        ('memory = "1GiB"\n' + MODEL + 'memory = "2GiB"', r"\[a\] memory is 2.00 GiB; .* 1.00 GiB"),
        (MODEL + 'aliases = ["a"]', "two models have the name 'a'"),
        (MODEL + '[b]\nmodel = "demo"\naliases = ["a"]', "two models have the name 'a'"),
        (MODEL + 'aliases = ["--host"]', "not a name"),
        ('[a]\nmodel = "--host"', "write a folder"),
        (MODEL + 'args = ["--port", "1"]', r"\[a\] args: --port: each server gets"),
        (MODEL + 'args = ["--api-key=x"]', "SACCADE_API_KEY"),
        (MODEL + 'args = ["--api_key=x"]', "SACCADE_API_KEY"),
        (MODEL + 'args = ["--files-dir", "x"]', "above all tables"),
        ('args = ["--host", "::"]\n' + MODEL, "args: --host"),
    ],
)
def test_a_mistake_is_told_by_table_and_field(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        read(text, tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_models(str(tmp_path / "missing.toml"))


def test_a_server_is_estimated_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert estimated_bytes("owner/name") is None
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "x").write_bytes(b"x" * 1000)
    for name in ("a.safetensors", "again.safetensors"):
        (snapshot / name).symlink_to(blobs / "x")
    (snapshot / "config.json").write_text("{}")
    assert estimated_bytes("owner/name") == PROCESS_BYTES + 1000
    assert estimated_bytes(str(snapshot)) == PROCESS_BYTES + 1000
    assert estimated_bytes(str(blobs / "x")) == PROCESS_BYTES + 1000
    assert (estimated_bytes("demo") or 0) > PROCESS_BYTES


@pytest.mark.parametrize("options", [{}, {"workers": ("http://a:1",), "models": "models.toml"}])
def test_a_router_has_workers_or_models(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--workers URLS or --models FILE"):
        RouteOptions(**options)  # type: ignore[arg-type]
