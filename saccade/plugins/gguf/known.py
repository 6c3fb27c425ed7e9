"""Combines all types of GGUF files: Qwen-VL's, and those that plugins' families declare."""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name

from saccade.families.registry import families
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.kinds import GgufFacts, NamedTensors, TextKind
from saccade.plugins.gguf.made import Made
from saccade.plugins.gguf.qwen_vl import FACTS

FOLDER_MAY = "try the model's Hugging Face folder instead"


@cache
def gguf_facts() -> GgufFacts:
    """Return the declarations of all families combined."""
    stated: list[GgufFacts] = [resolve_name(each.gguf) for each in families() if each.gguf]
    found = [FACTS, *stated]
    return GgufFacts(
        models={key: model for each in found for key, model in each.models.items()},
        texts={key: text for each in found for key, text in each.texts.items()},
        towers={key: tower for each in found for key, tower in each.towers.items()},
    )


def text_kind(file: GgufFile) -> TextKind:
    """Return how to read a file's language model. Raises CheckpointError with a list of the
    supported types.
    """
    arch, texts = file.architecture, gguf_facts().texts
    if arch == "clip":
        raise file.refuse(
            "it is a vision encoder: pass the language model's file as MODEL, and this file as "
            "--mmproj"
        )
    if arch not in texts:
        raise file.refuse(
            f"architecture {arch} is not supported (supported: {', '.join(sorted(texts))}); "
            f"{FOLDER_MAY}"
        )
    return texts[arch]


def projector(file: GgufFile) -> str:
    """Return the projector type, which determines the family.

    Raises CheckpointError.
    """
    towers = gguf_facts().towers
    for name in ("clip.projector_type", "clip.vision.projector_type"):
        if isinstance(found := file.metadata.get(name), str):
            if found in towers:
                return found
            raise file.refuse(
                f"{name} {found} is not supported (supported: {', '.join(sorted(towers))}); "
                f"{FOLDER_MAY}"
            )
    raise file.refuse("clip.projector_type is missing: pass an --mmproj file that has it")


def made_tensors(file: GgufFile) -> dict[str, Made]:
    """Return the checkpoint's tensors in this file, by their names in transformers.

    Unknown tensors keep their own names. Raises CheckpointError for a tensor of which a part is in
    another file.
    """
    named: NamedTensors
    if file.architecture == "clip":
        named = gguf_facts().towers[projector(file)](file)
    else:
        named = text_kind(file).names(file)
    return dict(named)
