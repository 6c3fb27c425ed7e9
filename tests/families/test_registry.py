"""Families are found by their folders: each states what it serves, and is imported alone."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import saccade
from saccade.core.errors import CheckpointError
from saccade.core.model_folder import DEMO
from saccade.families import registry
from saccade.families.registry import core_families, families, family_model, load_spec
from saccade.plugins import plugins
from saccade.plugins.models.gemma3.net import Gemma3Model
from tests.helpers.distribution import install_plugin

PACKAGE = Path(saccade.__file__).parent
FOLDER = """
from saccade.plugin import Family

FAMILY = Family(
    spec="saccade.plugins.models.gemma3.spec:gemma3_spec",
    model="saccade.plugins.models.gemma3.net:Gemma3Model",
    architectures=("NewForConditionalGeneration",),
    model_types=("new",),
)
"""
LOADED = """
import json, pathlib, sys
from saccade.families.registry import load_spec
load_spec(pathlib.Path(sys.argv[1]), checked=json.loads(sys.argv[2]))
print(json.dumps([name for name in sys.modules if name.startswith("saccade.")]))
"""


def loaded_by(folder: Path, checked: bool = False) -> set[str]:
    """Return our modules that a process has after it has read a checkpoint's spec."""
    command = [sys.executable, "-c", LOADED, str(folder), json.dumps(checked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_each_folder_with_a_spec_is_a_family() -> None:
    paths = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("spec.py")]
    stated = {family.spec.split(":")[0].rsplit(".", 1)[0] for family in families()}
    assert stated == {".".join(path.parent.parts) for path in paths}
    assert sum(bool(family.package) for family in families()) == 1, "one takes what others do not"


def test_no_two_families_claim_an_architecture() -> None:
    names = Counter(name for each in families() for name in each.architectures + each.model_types)
    assert set(names.values()) == {1}


def test_a_familys_spec_is_read_without_the_others(checkpoint: Callable[..., Path]) -> None:
    home = "saccade.plugins.models."
    loaded = {name.removeprefix(home) for name in loaded_by(checkpoint("gemma3")) if home in name}
    modules = {name for name in loaded if "." in name}
    assert modules == {"gemma3.images", "gemma3.spec"}
    assert loaded - modules > {"gemma3", "smolvlm"}, "records of all are looked at"


def test_a_family_of_the_core_is_read_without_a_record_of_plugins() -> None:
    loaded = loaded_by(DEMO)
    assert not [name for name in loaded if name.startswith("saccade.plugins.")]
    assert "saccade.plugins.quantized.quantization" not in loaded, "the checkpoint is not quantised"
    rest = loaded - loaded_by(DEMO, checked=True)
    assert rest == {"saccade.families.unread_fields"}


@pytest.fixture
def new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution whose plugin has a family in a folder of its own."""
    site = tmp_path / "site"
    (site / "newcomers" / "new").mkdir(parents=True)
    (site / "newcomers" / "new" / "__init__.py").write_text(FOLDER)
    (site / "newcomers" / "__init__.py").write_text(
        "from saccade.plugin import Checkpoints, Plugin\n"
        'PLUGIN = Plugin("newcomers", checkpoints=Checkpoints(families="newcomers"))\n'
    )
    install_plugin(site, "newcomers")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    for found in (plugins, families):
        found.cache_clear()
    yield
    for found in (plugins, families):
        found.cache_clear()
    for name in ("newcomers", "newcomers.new"):
        sys.modules.pop(name, None)


def as_architecture(name: str, source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    return folder


@pytest.mark.usefixtures("new_folder")
def test_a_new_folder_is_a_new_family(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = as_architecture(
        "NewForConditionalGeneration", checkpoint("gemma3"), tmp_path / "model"
    )
    assert isinstance(family_model(load_spec(folder)), Gemma3Model)


def test_without_plugins_other_architectures_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_architecture("NewForConditionalGeneration", DEMO, tmp_path / "model")
    monkeypatch.setattr(registry, "families", core_families)
    with pytest.raises(
        CheckpointError, match=r"NewForConditionalGeneration is not supported \(supported: Qwen2"
    ) as refused:
        load_spec(folder)
    assert "transformers" not in str(refused.value)
