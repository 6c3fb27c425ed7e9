"""Checkpoints that transformers itself saved: every family starts and answers as transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade_bench.fixtures.tiny import Reference
from saccade_bench.fixtures.tiny import reference as load_reference
from tests.families.forwarding import Session, load
from tests.families.test_parity import LOGITS, pixels, prompt

FAMILIES = (
    "qwen3_vl_moe",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_5",
            "qwen3_5_moe",
            "internvl",
            "minicpmv4_6",
        )
    ),
)


def saved(theirs: Reference, folder: Path) -> Reference:
    """What transformers writes of a model, beside the files of its tokenizer, loaded again."""
    shutil.copytree(theirs.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    theirs.model.save_pretrained(folder)
    return load_reference(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_transformers_saved_answers_as_transformers(
    reference: Callable[..., Reference], tmp_path: Path, family: str
) -> None:
    theirs = saved(reference(family), tmp_path / "saved")
    images = pixels(theirs, 1)
    session = Session(load(theirs.folder), prompt(theirs, 1), images, page_size=16)
    row = session.prefill()
    torch.testing.assert_close(row, theirs.logits(session.tokens, images), **LOGITS)
    wanted = theirs.generate(session.tokens, images, 12)
    found = [int(row[-1].argmax())]
    while len(found) < len(wanted):
        found.append(int(session.decode(found[-1]).flatten().argmax()))
    assert found == wanted
