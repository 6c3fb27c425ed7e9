"""Creates a directory that presents GGUF files as a checkpoint. It contains JSON files created from
their metadata, and a list of their paths.

All other code reads it like any checkpoint. It is in the user's cache, and its name is a hash of
its contents, so that it is reused. This module also chooses which GGUF files of a directory or a
Hub repository are the language model and the vision encoder.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from saccade.core.errors import CheckpointError
from saccade.core.model_folder import ELSEWHERE, check_revision, hub_errors
from saccade.core.private_folder import cache_folder, private_folder
from saccade.plugins.gguf.config import make_configs
from saccade.plugins.gguf.header import SPLIT, GgufFile, part_of, read_header
from saccade.plugins.gguf.known import made_tensors, text_kind
from saccade.plugins.gguf.tokenizer import make_tokenizer, tokenizer_settings

SUFFIX = ".gguf"
TOWERS = "mmproj"
"""A file with this in its name contains a vision encoder."""
EXACTEST = ("bf16", "f16", "f32", "q8_0")
"""The order of preference of formats, if several files contain the vision encoder."""
FORM = 3
"""The version of the directory's format. Increase it when the files are created differently."""

logger = logging.getLogger("saccade")


def resolve_files(model: str, revision: str | None, mmproj: str | None) -> Path | None:
    """Return the directory created for GGUF files, or None if `model` does not refer to any.

    `model` is a file, a directory or a Hub repository. `:FILE` after the last two selects one of
    their files.

    Raises CheckpointError with advice.
    """
    model, wanted = split_file(model)
    path = Path(model).expanduser()
    check_revision(model, path, revision)
    if path.suffix.lower() == SUFFIX:
        if wanted is not None:
            raise CheckpointError(f"{model}:{wanted}: {model} is a file: omit :{wanted}")
        tower = _given(mmproj) if mmproj else None
        return write_folder(_parts(path), tower or _neighbour(path))
    if path.is_dir() and not (path / "config.json").is_file() and _names(path):
        return _of_folder(path, wanted, mmproj)
    if not path.exists() and _wants_gguf(model, wanted):
        return write_folder(*_download(model, wanted, revision, mmproj))
    if given := mmproj or wanted:
        raise CheckpointError(f"{given}: {model} has no *.gguf file, which it would belong to")
    return None


def split_file(model: str) -> tuple[str, str | None]:
    """Split MODEL:FILE into the model and the file, as llama.cpp does. A path that exists is not
    split.
    """
    name, colon, wanted = model.rpartition(":")
    whole = (
        not colon or not name or not wanted or "/" in wanted or Path(model).expanduser().exists()
    )
    return (model, None) if whole else (name, wanted)


def write_folder(models: Sequence[Path], tower: Path | None) -> Path:
    """Create the directory for the files of a language model and of its vision encoder, if any.

    Raises CheckpointError with the file.
    """
    parts = [read_header(path) for path in models]
    for part in parts[1:]:
        if part.architecture != parts[0].architecture:
            raise part.refuse(
                f"it contains {part.architecture}, and does not belong to {models[0].name} "
                f"({parts[0].architecture}): pass the file of a vision encoder as --mmproj"
            )
    sight = read_header(tower) if tower else None
    if sight is not None and sight.architecture != "clip":
        raise sight.refuse("it has no vision encoder: pass the file that has one as --mmproj")
    files = _json_files(parts, sight)
    try:
        folder = cache_folder("gguf") / _name(files)
        with private_folder(folder) as kept:
            for name, text in files.items():
                kept.write(name, text.encode())
    except OSError as error:
        raise CheckpointError(
            f"the JSON files of {models[0]} cannot be written to the cache directory "
            f"($XDG_CACHE_HOME, or ~/.cache): {error.strerror}"
        ) from None
    return folder


def _json_files(parts: Sequence[GgufFile], tower: GgufFile | None) -> dict[str, str]:
    first = parts[0]
    configs = make_configs(first, tower, {name for each in parts for name in each.tensors})
    for each in (*parts, *((tower,) if tower else ())):
        made_tensors(each)  # raise its errors before any process is started
    if configs.defaults:
        logger.info(
            "%s does not set these fields, so they get the defaults of its type: %s",
            tower.path.name if tower else first.path.name,
            ", ".join(configs.defaults),
        )
    where = [str(each.path.absolute()) for each in (*parts, *((tower,) if tower else ()))]
    files: dict[str, Mapping[str, Any]] = {
        **configs.files,
        "tokenizer.json": make_tokenizer(first, text_kind(first).keep_space),
        "tokenizer_config.json": tokenizer_settings(first),
        ELSEWHERE: {"files": where},
    }
    return {name: json.dumps(data, ensure_ascii=False) for name, data in files.items() if data}


def _name(files: dict[str, str]) -> str:
    digest = blake3(str(FORM).encode())
    for name, text in sorted(files.items()):
        digest.update(f"{name} {len(text)} ".encode())
        digest.update(text.encode())
    return digest.hexdigest(16)


def _given(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise CheckpointError(f"--mmproj {name}: there is no such file")
    return path


def _parts(path: Path) -> list[Path]:
    """Return all files of a split model, given one of them. A model that is not split has
    one file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if (found := SPLIT.fullmatch(path.name)) is None:
        return [path]
    parts = [part_of(path, at) for at in range(1, int(found[3]) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(f"{path}: its other parts are missing: {', '.join(missing[:5])}")
    return parts


def _neighbour(model: Path) -> Path | None:
    """Return the path of the vision encoder's file in the same directory, or None."""
    return _tower([name for name in _names(model.parent) if name != model.name], model.parent)


def _of_folder(folder: Path, wanted: str | None, mmproj: str | None) -> Path:
    names = _names(folder)
    model = folder / choose(names, wanted, str(folder))
    tower = _given_in(folder, mmproj) if mmproj else _tower(names, folder)
    return write_folder(_parts(model), tower)


def _given_in(folder: Path, name: str) -> Path:
    inside = folder / name
    return inside if inside.is_file() else _given(name)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def choose(names: Sequence[str], wanted: str | None, where: str) -> str:
    """Return the name of the language model's file, which is the first one of a split model.

    wanted: the name of the file, or a part of it such as Q4_K_M. If empty, there must be only one
    file.
    where: the directory or repository, for messages.

    Raises CheckpointError with a list of the files.
    """
    models = [name for name in names if TOWERS not in name.lower()]
    models = [name for name in models if not (cut := SPLIT.fullmatch(name)) or int(cut[2]) == 1]
    if wanted is not None:
        same = [name for name in models if name == wanted]
        models = same or [name for name in models if _has_word(name, wanted)]
    if len(models) == 1:
        return models[0]
    choice = [name for name in names if TOWERS not in name.lower()]
    raise CheckpointError(
        f"{where}: {'none' if wanted and not models else 'several'} of its *.gguf files "
        f"{'fits' if wanted else 'could be meant'}"
        + (f" {wanted}" if wanted else "")
        + f": select one, as in {where}:{choice[0] if choice else 'FILE'} (there are: "
        f"{', '.join(choice[:30])})"
    )


def _has_word(name: str, word: str) -> bool:
    """Return True if a file's name contains this quantization. Q4_K does not match Q4_K_M."""
    return re.search(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])", name, re.I) is not None


def _tower(names: Sequence[str], folder: Path) -> Path | None:
    towers = [name for name in names if TOWERS in name.lower()]
    exact = [name for kind in EXACTEST for name in towers if _has_word(name, kind)]
    return folder / (exact or towers)[0] if towers else None


def _wants_gguf(model: str, wanted: str | None) -> bool:
    parts = model.split("/")
    named = len(parts) == 2 and all(parts) and not model.startswith((".", "~"))
    return named and (wanted is not None or "gguf" in model.lower())


def _download(
    repo: str, file: str | None, revision: str | None, mmproj: str | None
) -> tuple[list[Path], Path | None]:
    """Download the language model and the vision encoder from a Hub repository, and return their
    paths.

    Shows the progress bars of huggingface_hub. Raises CheckpointError.
    """
    from huggingface_hub import HfApi, snapshot_download  # as in core/model_folder.py

    with hub_errors(repo):
        names = HfApi().list_repo_files(repo, revision=revision)
        found = [name for name in names if name.endswith(SUFFIX)]
        if not found:
            raise CheckpointError(f"{repo} on the hub has no *.gguf file")
        model = choose(found, file, repo)
        wanted = [model]
        if (cut := SPLIT.fullmatch(model)) is not None:
            wanted = [f"{cut[1]}-*-of-{cut[3]}.gguf"]
        inside = mmproj if mmproj in found else None
        if mmproj is None and (best := _tower(found, Path())):
            inside = str(best)
        wanted += [inside] if inside else []
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    tower = folder / inside if inside else None
    return _parts(folder / model), tower or (_given(mmproj) if mmproj else None)
