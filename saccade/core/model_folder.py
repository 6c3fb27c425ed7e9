"""Finds the directory of a model on this machine, or downloads the model from the Hugging
Face hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saccade.core.errors import CheckpointError

DEMO = Path(__file__).parents[1] / "demo" / "model"
"""The directory of the built-in demo model."""
ELSEWHERE = "weights.json"
"""Name of the file that lists a model's weight files if they are not *.safetensors."""
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tiktoken.model"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Return the directory of `model`, which is "demo", a directory, or a Hugging Face hub id.

    A hub id is downloaded on first use, with the hub's progress bars. Raises CheckpointError, which
    explains what to do.
    """
    # Absolute, because processes with another working directory open it.
    folder = DEMO if model == "demo" else Path(model).expanduser().absolute()
    check_revision(model, folder, revision)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json: MODEL must be the directory with config.json and "
                "*.safetensors"
            )
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file: use the directory that contains it")
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or model.startswith((".", "~")):
        raise CheckpointError(
            f"there is no directory {model!r}, and it is not a hub id (like "
            "Qwen/Qwen3-VL-2B-Instruct) either"
        )
    return _download(model, revision)


def check_revision(model: str, path: Path, revision: str | None) -> None:
    """Raise CheckpointError if `revision` is set, but `path` exists, so the model is not from the
    hub.
    """
    if revision is not None and path.exists():
        raise CheckpointError(
            f"--revision {revision}: {model} is on this machine, and only hub models have "
            "revisions: omit the option, or use the hub id"
        )


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # imported here because it takes long

    with hub_errors(repo):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=DOWNLOADED))
        folder = folder.absolute()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{repo} on the hub has no config.json: it is not a transformers checkpoint (to use a "
            f"*.gguf file, select one, as in {repo}:Q4_K_M)"
        )
    return folder


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Convert the hub's errors about `repo` within the context to CheckpointError, which explains
    what to do.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its terms on the hub, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no directory or hub repository {repo}: correct the name, or run `hf auth "
            "login` if the repository is private"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        # The hub's own message is a paragraph if it cannot be reached, so this one is short.
        why = str(error.__cause__ or error).partition("\n")[0]
        raise CheckpointError(
            f"cannot download {repo} (you can download it elsewhere and pass its directory): {why}"
        ) from error
