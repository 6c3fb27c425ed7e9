"""All kinds of GGUF files that families state."""

from __future__ import annotations

from collections.abc import Iterable

from saccade.gguf.header import GgufFile
from saccade.gguf.kinds import GgufFacts, NamedTensors, TextKind
from saccade.gguf.made import Made

FOLDER_MAY = "another may work from its Hugging Face folder"


def join_facts(stated: Iterable[GgufFacts]) -> GgufFacts:
    """Return the facts of all families as one."""
    found = [*stated]
    return GgufFacts(
        models={key: model for each in found for key, model in each.models.items()},
        texts={key: text for each in found for key, text in each.texts.items()},
        towers={key: tower for each in found for key, tower in each.towers.items()},
    )


def text_kind(file: GgufFile, facts: GgufFacts) -> TextKind:
    """Return a language model's kind. Raises CheckpointError that lists the known ones."""
    arch, texts = file.architecture, facts.texts
    if arch == "clip":
        raise file.refuse("it is a vision tower: give the language model's file, this as --mmproj")
    if arch not in texts:
        raise file.refuse(
            f"architecture {arch} is not supported; supported are {', '.join(sorted(texts))}, and "
            f"{FOLDER_MAY}"
        )
    return texts[arch]


def projector(file: GgufFile, facts: GgufFacts) -> str:
    """Return the way from the tower's rows to tokens, which tells the family.

    Raises CheckpointError.
    """
    towers = facts.towers
    for name in ("clip.projector_type", "clip.vision.projector_type"):
        if isinstance(found := file.metadata.get(name), str):
            if found in towers:
                return found
            raise file.refuse(
                f"{name} {found} is not supported; supported are {', '.join(sorted(towers))}, and "
                f"{FOLDER_MAY}"
            )
    raise file.refuse("clip.projector_type is missing: give the --mmproj file of a model with one")


def made_tensors(file: GgufFile, facts: GgufFacts) -> dict[str, Made]:
    """Return the checkpoint's tensors in this file, by transformers' names.

    Unknown tensors keep their own name.

    Raises CheckpointError for a tensor with a part in another file.
    """
    named: NamedTensors
    if file.architecture == "clip":
        named = facts.towers[projector(file, facts)](file)
    else:
        named = text_kind(file, facts).names(file)
    return dict(named)
