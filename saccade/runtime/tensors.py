"""The safetensors files of a checkpoint: which there are, and how one that cannot be read is named.
Knows nothing of what the tensors are for (`weights.py`, `packed_weights.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import read_json

Places = Mapping[str, tuple[Path, str]]
"""By canonical name, where a tensor is: its file, and its name there."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold weights: those of the index where there is one.

    Raises CheckpointError where any is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).section("weight_map").data.values()))
        files = [folder / str(name) for name in names]
        if missing := [path.name for path in files if not path.is_file()]:
            raise CheckpointError(
                f"{index} names files that are not there: {', '.join(missing)}: the download "
                "is not complete"
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors file (only safetensors are read; --tune "
            "load_format=dummy needs none)"
        )
    return files


def damaged(path: Path, name: str, error: SafetensorError) -> CheckpointError:
    """The error for tensor `name` of the file `path`."""
    return CheckpointError(f"{path}: tensor {name} cannot be read: {error}")


def open_tensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not complete: {error}") from error
