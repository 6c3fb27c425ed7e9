"""Checkpoints in formats of plugins, which are imported for models that may be in them alone."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.core.errors import CheckpointError
from saccade.core.model_folder import DEMO
from saccade.families import registry
from saccade.families.registry import find_format, resolve_checkpoint
from saccade.nn.weights import Part
from saccade.plugin import Checkpoints, Plugin
from saccade.plugins import plugins
from saccade.plugins.gguf import PLUGIN as GGUF
from saccade.runtime.weights.checkpoint_weights import CheckpointWeights
from saccade.runtime.weights.tensors import TensorFiles
from tests.helpers.distribution import install_plugin

PLANTED = """
import json
from pathlib import Path
from safetensors import safe_open
from saccade.plugin import CheckpointFormat, Checkpoints, Plugin

FORMAT = CheckpointFormat(".planted", "planted:folder", "planted:opened", "planted:stored")
PLUGIN = Plugin("planted", checkpoints=Checkpoints(formats=(FORMAT,)))
asked = []

def folder(model, revision, tower_file):
    path = Path(model)
    if path.suffix != ".planted":
        return None
    made = path.parent / "made"
    (made / "weights.json").write_text(json.dumps({"files": [str(path)]}))
    return made

def opened(path):
    return safe_open(path, framework="pt")

def stored(loading, name):
    asked.append(name)
    return None
"""
RESOLVED = """
import sys
from saccade.core.options import ModelOptions
from saccade.families.registry import find_format, resolve_checkpoint
from pathlib import Path
resolve_checkpoint("demo")
find_format(Path("model.safetensors"))
print(*(name for name in sys.modules if name.startswith("saccade.plugins.gguf.")))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a distribution with a format: safetensors by another name."""
    site = tmp_path / "site"
    install_plugin(site, "planted")
    (site / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    plugins.cache_clear()
    yield tmp_path
    plugins.cache_clear()
    sys.modules.pop("planted", None)


def test_a_plugin_brings_a_format(planted: Path, checkpoint: Callable[..., Path]) -> None:
    source = checkpoint("qwen2_vl")
    shutil.copytree(source, planted / "made")
    file = (planted / "made" / "model.safetensors").rename(planted / "model.planted")
    folder = resolve_checkpoint(str(file))
    assert folder == planted / "made" and not [*folder.glob("*.safetensors")]
    found, expected = TensorFiles(folder, str), TensorFiles(source, str)
    assert {*found} == {*expected}
    with CheckpointWeights(folder, str, torch.float32, torch.device("cpu")) as weights:
        for name in expected:
            _, shape = expected.describe(name)
            part = Part(name, shape)
            assert torch.equal(weights.load(part), expected.read_slice(part).float())
    assert {*importlib.import_module("planted").asked} == {*expected}


def test_a_model_without_such_files_imports_no_format() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("model", "asks"),
    [
        *(("demo", False), (str(DEMO), False), ("Qwen/Qwen3-VL-2B-Instruct", False)),
        *(("model.gguf", True), ("a/model.GGUF", True), ("someone/tiny-GGUF", True)),
        ("someone/tiny:Q8_0", True),
    ],
)
def test_a_format_is_asked_where_a_model_may_be_in_it(
    model: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    (stated,) = GGUF.checkpoints.formats
    told = replace(stated, folder=f"{__name__}:hear")
    planted = Plugin("gguf", checkpoints=Checkpoints(formats=(told,)))
    monkeypatch.setattr(registry, "plugins", lambda: [planted])
    monkeypatch.setattr(registry, "resolve_model", lambda *_: Path("resolved"))
    monkeypatch.setitem(globals(), "hear", lambda given, *_: heard.append(given))
    assert resolve_checkpoint(model) == Path("resolved")
    assert heard == [model] * asks


def test_a_tower_s_file_without_a_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plugins", list)
    assert find_format(Path("model.gguf")) is None
    with pytest.raises(CheckpointError, match=r"--mmproj tower\.gguf: demo is not in a format"):
        resolve_checkpoint("demo", tower_file="tower.gguf")
