"""Mechanisms that benchmarks switch off: they save work, and no answer depends on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.published.rows import ROWS
from tests.fixtures.tiny import picture
from tests.helpers.images import content, image_part, text_part, user

pytestmark = pytest.mark.more

OPTIONS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192"),
    *("--chunked-prefill-size", "64"),
)
OFF = tuple(word for switch in dict.fromkeys(row.off for row in ROWS) for word in switch)
ROUNDS = 3


def chat(server: Server) -> list[str]:
    """The answers of a chat with a new image of one size in each round."""
    messages: list[dict[str, Any]] = []
    answers = []
    for number in range(ROUNDS):
        parts = [image_part(picture(64, 96, seed=number)), text_part(f"What is this, {number}?")]
        messages.append(user(*parts))
        answers.append(content(server.chat(*messages, max_tokens=8, ignore_eos=True)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_mechanisms_save_work_and_change_no_answer(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, found = checkpoint("qwen3_vl"), []
    for options in ((), OFF):
        with serving(folder, tmp_path, *OPTIONS, *options) as server:
            answers = chat(server)
            encoded = server.metric("saccade_images_encoded_total")
            lookups = {
                outcome: server.metric(
                    "saccade_position_cache_lookups_total", kind="encoder", outcome=outcome
                )
                for outcome in ("hit", "miss")
            }
            found.append((answers, encoded, lookups))
    (on, on_encoded, on_lookups), (off, off_encoded, off_lookups) = found
    assert on == off
    assert on_encoded == ROUNDS and off_encoded == 1 + 2 + 3
    assert on_lookups["miss"] == 1 and on_lookups["hit"] >= ROUNDS - 1
    assert off_lookups["hit"] == 0 and off_lookups["miss"] >= off_encoded
