"""`LLM.embed` and `LLM.score` give what a server gives: the reference's embeddings and scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from saccade import LLM
from saccade.core.errors import InvalidRequest
from tests.e2e.test_scores import PICTURES, TEXTS, Author, check
from tests.fixtures.colqwen import Content, make_colqwen
from tests.fixtures.tiny import Reference

OPTIONS = {"dtype": "float32", "threads": 1, "media_workers": 1}


@pytest.mark.more
def test_inputs_are_embedded(
    checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    folder = checkpoint("qwen3_vl", pooling="embed")
    author = Author(folder, reference("qwen3_vl", pooling="embed"))
    with LLM(folder, **OPTIONS) as llm:
        found = llm.embed([TEXTS[0], PICTURES[0], [PICTURES[1], TEXTS[1]]])
        contents = ((TEXTS[0],), (PICTURES[0],), (PICTURES[1], TEXTS[1]))
        check(found, [author.embedding(content) for content in contents])
        short = llm.embed([TEXTS[0]], dimensions=8)
        first = found[0, :8]
        assert np.abs(short[0] - first / np.linalg.norm(first)).max() < 1e-6
        assert llm.embed([]).shape == (0, 0)
        with pytest.raises(InvalidRequest, match="dimensions: expected from 1 to 64, got 65"):
            llm.embed(["a"], dimensions=65)
        with pytest.raises(InvalidRequest, match="Qwen3-VL-Reranker"):
            llm.score("a", ["b"])


@pytest.mark.slow
def test_documents_are_scored(
    checkpoint: Callable[..., Path], reference: Callable[..., Reference]
) -> None:
    folder = checkpoint("qwen3_vl", pooling="rank")
    judge = Author(folder, reference("qwen3_vl", pooling="rank"))
    with LLM(folder, **OPTIONS) as llm:
        documents = (TEXTS[0], PICTURES[0], [PICTURES[1], TEXTS[1]])
        found = llm.score(TEXTS[2], documents)
        contents = ((TEXTS[0],), (PICTURES[0],), (PICTURES[1], TEXTS[1]))
        expected = [judge.score((TEXTS[2],), content) for content in contents]
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.more
def test_tokens_are_embedded_and_pages_scored_by_them(tmp_path: Path) -> None:
    author = make_colqwen(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        contents: tuple[Content, ...] = (TEXTS[0], PICTURES[0])
        for found, content in zip(llm.embed_tokens(contents), contents, strict=True):
            assert np.abs(found - author.embedding(content)).max() < 1e-5
        scores = llm.score(TEXTS[0], PICTURES[:2])
        expected = [author.score(TEXTS[0], page) for page in PICTURES[:2]]
        assert scores == pytest.approx(expected, abs=1e-4)
        assert llm.embed_tokens([]) == [] and llm.score("a", []) == []
        with pytest.raises(InvalidRequest, match=r"use LLM\.embed_tokens"):
            llm.embed(["a"])
