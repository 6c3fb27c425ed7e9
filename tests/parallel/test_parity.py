"""Several ranks answer as transformers does: greedy, float32, token for token, however heads,
weights and pictures are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.config import EncoderMode
from saccade.families.registry import load_spec
from saccade.runtime.weights import load_net
from saccade_bench.fixtures.crew import ThreadCrew
from saccade_bench.fixtures.harness import Harness, set_threads
from saccade_bench.fixtures.tiny import make_checkpoint, reference
from tests.engine.test_parity import CASES, Model, check, reference_answer
from tests.families.every import SEEING
from tests.helpers.breadth import combinations

ASKED = ("text", "one picture", "three pictures", "three turns", "the same picture twice")


Load = Callable[[str, int], tuple[Path, Model]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Checkpoint of a family with so many heads of keys, and what transformers answers with it."""
    set_threads()

    @cache
    def make(family: str, kv_heads: int) -> tuple[Path, Model]:
        folder = make_checkpoint(
            tmp_path_factory.mktemp(family), family, text={"num_key_value_heads": kv_heads}
        )
        net = load_net(
            load_spec(folder),
            folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        bare = Model(
            net, Tokenizer.from_file(str(folder / "tokenizer.json")), reference(folder), {}
        )
        return folder, Model(
            net,
            bare.tokenizer,
            bare.reference,
            {name: reference_answer(bare, CASES[name]) for name in ASKED},
        )

    return make


# Fewer heads of keys than ranks, as many, and more.
SHARES = combinations(
    SEEING,
    (1, 2, 4),
    (1, 2, 4),
    ("weights", "data"),
    default=[
        ("qwen2_5_vl", 4, 4, "weights"),
        ("qwen3_vl", 4, 2, "data"),
    ],
)


@pytest.mark.first
@pytest.mark.parametrize(("family", "kv_heads", "size", "encoder"), SHARES)
def test_ranks_answer_as_transformers_cold_warm_and_at_once(
    load: Load, family: str, kv_heads: int, size: int, encoder: EncoderMode
) -> None:
    folder, model = load(family, kv_heads)
    check_crew(model, ThreadCrew(folder, size, encoder))


# (slices of all else, runs of whole experts)
@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "size", "runs"),
    combinations(
        ("qwen3_vl_moe", "qwen3_5_moe"), (1, 2, 4), (2, 4), default=[("qwen3_vl_moe", 1, 2)]
    ),
)
def test_ranks_that_hold_whole_experts_answer_as_transformers(
    load: Load, family: str, size: int, runs: int
) -> None:
    folder, model = load(family, 2)
    check_crew(model, ThreadCrew(folder, size, "data", expert_runs=runs))


def check_crew(model: Model, crew: ThreadCrew) -> None:
    """Cold, warm, and all at once."""
    harness = Harness(model.net, crew, chunk_tokens=64)
    check(model, harness.run([model.request(harness, name) for name in ASKED]))
    encoded = len(harness.encoded)
    for name in ASKED:
        check(model, harness.run([model.request(harness, name)]))
    assert len(harness.encoded) == encoded, "a seen picture is not encoded again"
