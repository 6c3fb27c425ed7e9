"""Several ranks answer as transformers does: greedy, float32, token for token, however heads,
weights and pictures are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from saccade.core.config import EncoderMode
from tests.families import answers
from tests.families.answers import ASKED, Model, check_rank_group
from tests.families.every import SEEING
from tests.fixtures.rank_group import ThreadRankGroup
from tests.helpers.breadth import combinations

Load = Callable[[str, int], Model]


@pytest.fixture(scope="module")
def load(checkpoint: Callable[..., Path]) -> Load:
    """A model with so many heads of keys, and what transformers answers with it."""

    @cache
    def make(family: str, kv_heads: int) -> Model:
        return answers.load(checkpoint(family, text={"num_key_value_heads": kv_heads}), ASKED)

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
    model = load(family, kv_heads)
    check_rank_group(model, ThreadRankGroup(model.reference.folder, size, encoder))


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
    model = load(family, 2)
    check_rank_group(model, ThreadRankGroup(model.reference.folder, size, "data", expert_runs=runs))
