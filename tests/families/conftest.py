"""Checkpoints with other fields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import transformers

from saccade.core.errors import CheckpointError
from saccade.core.family import FamilySpec
from saccade.families.registry import load_spec


class Changed(Protocol):
    """`changed(family, file, **fields)`: a copy of a checkpoint, fields of one file replaced, those
    of objects one by one.
    """

    def __call__(self, family: str, file: str, /, **fields: Any) -> Path: ...


class Refused(Protocol):
    """`refused(family, file, words, **fields)`: loading `changed`'s checkpoint ends with words."""

    def __call__(self, family: str, file: str, words: str, /, **fields: Any) -> None: ...


@pytest.fixture
def changed(checkpoint: Callable[..., Path], tmp_path: Path) -> Changed:
    def change(family: str, file: str, /, **fields: Any) -> Path:
        folder = tmp_path / family
        if not folder.exists():
            shutil.copytree(checkpoint(family), folder)
        data = json.loads((folder / file).read_text())
        within = {
            name: data[name] | value
            for name, value in fields.items()
            if isinstance(value, dict) and isinstance(data.get(name), dict)
        }
        (folder / file).write_text(json.dumps(data | fields | within))
        return folder

    return change


@pytest.fixture
def refused(changed: Changed) -> Refused:
    def check(family: str, file: str, words: str, /, **fields: Any) -> None:
        folder = changed(family, file, **fields)
        with pytest.raises(CheckpointError, match=words):
            load_spec(folder)

    return check


def check_hub(folder: Path) -> FamilySpec:
    """Read a folder, and compare what its configuration leaves out with transformers' defaults."""
    spec, path = load_spec(folder), folder / "config.json"
    data = json.loads(path.read_text())
    whole = transformers.AutoConfig.from_pretrained(folder).to_dict()
    assert len(str(whole)) > 1.5 * len(str(data))
    path.write_text(json.dumps(whole | {"architectures": data["architectures"]}))
    assert load_spec(folder) == spec
    path.write_text(json.dumps(data))
    return spec


Refusals = Mapping[str, Sequence[tuple[Mapping[str, Any], str]]]
"""By file: fields, and the words that refuse them."""


def listed(refusals: Refusals) -> list[Any]:
    """Return cases (file, fields, words)."""
    return [(file, fields, words) for file, them in refusals.items() for fields, words in them]


def refusals_by_name(family: str, refusals: Refusals) -> Callable[..., None]:
    """Return a family's test that what is not supported is refused by its name."""

    @pytest.mark.whole
    @pytest.mark.parametrize(("file", "fields", "words"), listed(refusals))
    def test(refused: Refused, file: str, fields: dict[str, Any], words: str) -> None:
        refused(family, file, words, **fields)

    return test
