"""Architectures that no list names, made tiny, loaded and asked: `python -m
tests.families.unlisted [TYPE ...]` prints of each whether its answers are those of transformers'
own `generate`, or the sentence that refuses it.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from tokenizers import Tokenizer

from saccade.core.errors import StartupError
from saccade.core.family import put_spaces
from saccade.core.types import Image, ImageKey
from saccade.families.registry import load_spec
from saccade.media.content import encode_array
from saccade.media.formats.decode import decode_into
from saccade.plugins.any_model.spec import AnySpec
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import picture
from tests.fixtures.tiny_any import AnyReference, any_reference, make_kind
from tests.fixtures.tiny_any_texts import Kind
from tests.fixtures.unlisted import SEERS, readers

TOKENS = 12
TEXTS = ("the quick brown fox jumps over the lazy dog; how many", "one green star")
SEEN = (("look: @ how many?", ((112, 140),)), ("@ then @x", ((64, 96), (150, 70))))

Ending = Literal["right", "refused", "wrong", "died", "not made"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one architecture, and why."""

    ending: Ending
    why: str = ""


def judge(kind: Kind, folder: Path) -> Verdict:
    """Make the architecture in `folder`, load it as a server does, and compare its answers."""
    try:
        make_kind(folder, kind)
    except Exception as error:  # transformers raises what it pleases
        return Verdict("not made", f"{type(error).__name__}: {error}")
    try:
        spec = cast(AnySpec, load_spec(folder))
        net = load_net(spec, folder, dtype=torch.float32, device=torch.device("cpu"))
    except StartupError as error:
        return Verdict("refused", str(error).replace(str(folder), "FOLDER"))
    except Exception as error:
        return Verdict("died", f"{type(error).__name__}: {error}")
    reference = any_reference(folder)
    for text, sizes in (*((text, ()) for text in TEXTS), *(SEEN if kind.image else ())):
        shown = [picture(size[0], size[1], seed=size[0]) for size in sizes]
        try:
            ours = _answer(net, spec, text.replace("@", kind.image), shown)
        except Exception as error:
            return Verdict("died", f"{text!r}: {type(error).__name__}: {error}")
        theirs = _reference_answer(reference, text.replace("@", kind.image), shown)
        if isinstance(theirs, str):
            return Verdict("right", f"but its own generate raises at {text!r}: {theirs}")
        if ours != theirs:
            return Verdict("wrong", f"{text!r}: {ours}, not {theirs}")
    return Verdict("right")


def _reference_answer(
    reference: AnyReference, text: str, shown: list[np.ndarray]
) -> list[int] | str:
    try:
        return reference.generate(text, shown, TOKENS)
    except Exception as error:  # transformers raises what it pleases
        return f"{type(error).__name__}: {error}"


def _answer(net: Any, spec: AnySpec, text: str, shown: list[np.ndarray]) -> list[int] | str:
    """Tokens, or the error of the request."""
    harness = Harness(net)
    if mark := spec.templates.spaced:
        text = put_spaces(text, mark)
    tokenizer = Tokenizer.from_file(str(spec.folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    images = []
    for pixels in shown:
        recipe = spec.recipe(pixels.shape[0], pixels.shape[1], spec.pixel_bounds)
        canvas = np.empty((*recipe.canvas, 3), np.uint8)
        raw = memoryview(encode_array(pixels))
        decode_into([(canvas, recipe)], raw, (pixels.shape[0], pixels.shape[1]), 1)
        key = ImageKey(str(pixels.shape).encode().ljust(32, b"\0"), spec.settings(recipe))
        harness.pixels[key] = canvas
        grid = recipe.grid
        rows, patches = spec.num_tokens(grid), spec.num_patches(grid)
        images.append(Image(key, grid, rows, patches, recipe.canvas))
    outcome = harness.run([harness.request("it", ids, images, max_tokens=TOKENS)])["it"]
    return outcome.error or outcome.tokens


def main() -> None:
    set_threads()
    kinds = {**SEERS, **readers()}
    found = Counter[Ending]()
    for name in sys.argv[1:] or kinds:
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(kinds[name], Path(folder) / name)
        found[verdict.ending] += 1
        why = " ".join(verdict.why.split())
        print(f"{verdict.ending:8} {kinds[name].model:44} {why[:300]}", flush=True)
    print(", ".join(f"{count} {ending}" for ending, count in found.most_common()))


if __name__ == "__main__":
    main()
