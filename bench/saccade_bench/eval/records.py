"""Read rows, and the images in their cells, from question files: JSON lines, JSON, Parquet, or data
sets of the Hugging Face hub.

Parquet needs pyarrow and the hub needs a network connection, but only when they are used.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install

Row = dict[str, Any]


def load_rows(source: str, pattern: str = "**/*.parquet") -> Iterator[tuple[Row, Path]]:
    """Yield the rows of a file, of a folder's files, or of a hub data set's files that match
    `pattern`, each with the directory to which its paths are relative.

    Raises ConfigError if no file matches.
    """
    path = Path(source)
    if path.is_file():
        yield from _read(path)
        return
    if not path.is_dir():
        path = _download(source, pattern)
    files = sorted(file for file in path.glob(pattern) if file.is_file()) or sorted(
        path.glob("*.json*")
    )
    if not files:
        raise ConfigError(f"{source}: no file fits {pattern}")
    for file in files:
        yield from _read(file)


def image_bytes(cell: Any, folder: Path) -> bytes | None:
    """Return the encoded image of a cell, or None if it is empty.

    A cell may be a path, a data URL, base64 text, raw bytes, or the hub's {"bytes", "path"}. Raises
    ConfigError if it is none of these.
    """
    if isinstance(cell, dict):
        return image_bytes(cell.get("bytes") or cell.get("path"), folder)
    if isinstance(cell, bytes) or cell is None:
        return cell
    text = str(cell)
    if text.startswith("data:"):
        return base64.b64decode(text.partition(",")[2])
    if len(text) < 1024 and (folder / text).is_file():
        return (folder / text).read_bytes()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ConfigError(f"no such picture: {folder / text[:200]}") from None


def _read(path: Path) -> Iterator[tuple[Row, Path]]:
    if path.suffix == ".parquet":
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                f"{path.name}: reading Parquet needs pyarrow: {how_to_install('pyarrow')}"
            ) from None
        for batch in parquet.ParquetFile(path).iter_batches(64):
            yield from ((row, path.parent) for row in batch.to_pylist())
        return
    try:
        text = path.read_text()
        rows = (
            json.loads(text)
            if path.suffix == ".json"
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    yield from ((row, path.parent) for row in rows)


def _download(name: str, pattern: str) -> Path:
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(
                name, repo_type="dataset", allow_patterns=pattern.replace("**/", "*")
            )
        )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"{name}: there is no such file or folder here, and the hub says: {str(error)[:300]}; "
            f"without the hub: download the data set elsewhere (hf download {name} --repo-type "
            "dataset --local-dir FOLDER), put FOLDER here and give --dataset-path FOLDER"
        ) from None
