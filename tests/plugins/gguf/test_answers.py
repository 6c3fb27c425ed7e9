"""A model of GGUF files answers as transformers does with the same weights, rounded as the files
have them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from saccade.families.registry import load_spec, resolve_checkpoint
from saccade.plugins.gguf.folder import write_folder
from tests.families.forwarding import Session, load
from tests.fixtures.gguf_files import Files, write_files
from tests.fixtures.tiny import Reference, picture, reference
from tests.plugins.gguf.files import GGUF_FAMILIES

SIZES = [(150, 97), (200, 333)]


def greedy(folder: Path, tokens: list[int], images: list[np.ndarray], count: int) -> list[int]:
    session = Session(load(folder), tokens, images, page_size=16)
    answer = [int(session.prefill()[-1].argmax())]
    while len(answer) < count:
        answer.append(int(session.decode(answer[-1]).argmax()))
    return answer


def prompt(theirs: Reference, images: int) -> list[int]:
    tokenizer = Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    shown = [token for _ in range(images) for token in tokenizer.encode(theirs.placeholder).ids]
    return [11, 12, *shown, 30, 31, 32]


@pytest.fixture
def made(
    gguf_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Files]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(family: str, kind: Kind, *, tie: bool = False, **fields: Any) -> Files:
        return write_files(gguf_checkpoint(family, tie), tmp_path / "out", kind, **fields)

    return make


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_greedy_answers_about_images_are_those_of_transformers(
    made: Callable[..., Files], family: str, kind: str
) -> None:
    files = made(family, Kind[kind])
    theirs = reference(files.rounded)
    images = [theirs.resize(picture(*size, seed=at)) for at, size in enumerate(SIZES)]
    folder = write_folder([files.model], files.mmproj)
    tokens = prompt(theirs, len(images))
    session = Session(load(folder), tokens, images, page_size=None)
    expected = theirs.logits(session.tokens, images)
    torch.testing.assert_close(session.prefill(), expected, atol=3e-4, rtol=0.0)
    answer = theirs.generate(session.tokens, images, max_new_tokens=12)
    assert greedy(folder, tokens, images, len(answer)) == answer


def test_a_head_that_the_file_lacks_is_the_embedding(made: Callable[..., Files]) -> None:
    files = made("qwen3_vl", Kind.Q8_0, tie=True)
    theirs = reference(files.rounded)
    folder = write_folder([files.model], files.mmproj)
    assert load_spec(folder).text.tied  # type: ignore[attr-defined]
    session = Session(load(folder), prompt(theirs, 0), [], page_size=None)
    expected = theirs.logits(session.tokens)
    torch.testing.assert_close(session.prefill(), expected, atol=3e-4, rtol=0.0)


def test_a_language_model_without_a_tower_answers_text(made: Callable[..., Files]) -> None:
    files = made("qwen3_5", Kind.Q8_0)
    theirs = reference(files.rounded)
    folder = write_folder([files.model], None)
    assert not load_spec(folder).sees_images
    session = Session(load(folder), prompt(theirs, 0), [], page_size=None)
    expected = theirs.logits(session.tokens)
    torch.testing.assert_close(session.prefill(), expected, atol=3e-4, rtol=0.0)


def test_a_split_model_is_read_by_any_part(made: Callable[..., Files]) -> None:
    files = made("qwen3_vl", Kind.Q8_0, each=20)
    theirs = reference(files.rounded)
    parts = sorted(files.model.parent.glob("model-*-of-*.gguf"))
    assert len(parts) == 2
    folder = resolve_checkpoint(str(parts[1]), tower_file=str(files.mmproj))
    assert folder == resolve_checkpoint(str(parts[0]), tower_file=str(files.mmproj))
    session = Session(load(folder), prompt(theirs, 0), [], page_size=None)
    expected = theirs.logits(session.tokens)
    torch.testing.assert_close(session.prefill(), expected, atol=3e-4, rtol=0.0)
