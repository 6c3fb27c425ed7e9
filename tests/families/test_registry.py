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

import saccade.families
from saccade.families.gemma3.net import Gemma3Model
from saccade.families.registry import families, family_model, load_spec

ROOT = Path(saccade.families.__file__).parent
FOLDER = """
from saccade.families.family import Family

FAMILY = Family(
    spec="saccade.families.gemma3.spec:gemma3_spec",
    model="saccade.families.gemma3.net:Gemma3Model",
    architectures=("NewForConditionalGeneration",),
    model_types=("new",),
)
"""


def test_each_folder_with_a_spec_is_a_family() -> None:
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("spec.py")}
    stated = {family.spec.split(":")[0].rsplit(".", 1)[0] for family in families()}
    assert stated == {"saccade.families." + each.replace("/", ".") for each in folders}
    assert sum(bool(family.package) for family in families()) == 1, "one takes what others do not"


def test_no_two_families_claim_an_architecture() -> None:
    names = Counter(name for each in families() for name in each.architectures + each.model_types)
    assert set(names.values()) == {1}


def test_a_familys_spec_is_read_without_the_others(checkpoint: Callable[..., Path]) -> None:
    program = f"""
import pathlib, sys
from saccade.families.registry import load_spec
load_spec(pathlib.Path({str(checkpoint("gemma3"))!r}))
print([name for name in sys.modules if name.startswith("saccade.families.")])
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = [
        name.split(".")[2:]
        for name in json.loads(answer.stdout.replace("'", '"'))
        if (ROOT / name.split(".")[2]).is_dir()
    ]
    assert {parts[0] for parts in loaded if parts[-1] in ("spec", "config", "images")} == {"gemma3"}
    assert sorted(parts[1] for parts in loaded if parts[0] == "gemma3" and parts[1:]) == [
        *("images", "spec")
    ]


@pytest.fixture
def new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family in a folder of its own, and nothing elsewhere."""
    (tmp_path / "found" / "new").mkdir(parents=True)
    (tmp_path / "found" / "new" / "__init__.py").write_text(FOLDER)
    monkeypatch.setattr(
        saccade.families, "__path__", [*saccade.families.__path__, str(tmp_path / "found")]
    )
    importlib.invalidate_caches()
    families.cache_clear()
    yield
    families.cache_clear()
    sys.modules.pop("saccade.families.new", None)


@pytest.mark.usefixtures("new_folder")
def test_a_new_folder_is_a_new_family(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("gemma3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["NewForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    assert isinstance(family_model(load_spec(folder)), Gemma3Model)
