"""Represents a model of the Hugging Face Hub as a directory without weights: the JSON files, and
sparse safetensors files, of which only the headers take space on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from saccade.core.errors import CheckpointError
from saccade.core.model_folder import DOWNLOADED, hub_errors
from saccade.families.registry import resolve_checkpoint

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import SafetensorsFileMetadata

WEIGHTS = "*.safetensors"


@contextmanager
def described_folder(model: str, revision: str | None, mmproj: str | None) -> Iterator[Path]:
    """Yield the directory of `model`, as `saccade serve` resolves it. Weights are not downloaded
    from the Hub.

    Raises CheckpointError with advice.
    """
    name, _, file = model.partition(":")
    if model == "demo" or Path(model).expanduser().exists() or Path(name).expanduser().exists():
        yield resolve_checkpoint(model, revision, mmproj)
        return
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or model.startswith((".", "~")):
        yield resolve_checkpoint(model, revision, mmproj)  # raises the error
        return
    if file or mmproj or "gguf" in name.lower():
        raise CheckpointError(
            f"{model}: the headers of GGUF files are not read from the hub: download the file, and "
            "give its path"
        )
    with TemporaryDirectory() as folder:
        _describe(name, revision, Path(folder))
        yield Path(folder)


def _describe(repo: str, revision: str | None, folder: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download  # imported here because the import is slow
    from huggingface_hub.errors import NotASafetensorsRepoError

    with hub_errors(repo):
        wanted = [pattern for pattern in DOWNLOADED if pattern != WEIGHTS]
        snapshot_download(repo, revision=revision, allow_patterns=wanted, local_dir=folder)
        try:
            found = HfApi().get_safetensors_metadata(repo, revision=revision)
        except NotASafetensorsRepoError:
            raise CheckpointError(f"{repo} on the hub has no {WEIGHTS} file") from None
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{repo} on the hub has no config.json")
    for name, file in found.files_metadata.items():
        if (folder / name).resolve().parent != folder.resolve():  # the index may contain any path
            raise CheckpointError(f"{repo} on the hub has weights outside its folder: {name!r}")
        write_header(folder / name, file)


def write_header(path: Path, file: SafetensorsFileMetadata) -> None:
    """Write a sparse safetensors file with the header of `file`, but without the values of
    tensors.
    """
    header = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": list(tensor.data_offsets),
        }
        for name, tensor in file.tensors.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    end = max((tensor.data_offsets[1] for tensor in file.tensors.values()), default=0)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + end)
