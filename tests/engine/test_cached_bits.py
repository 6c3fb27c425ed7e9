"""What is cached, batched or cut otherwise never changes an answer in bfloat16, to the bit, where
the processor multiplies bfloat16 numbers (decision 012).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.core.config import KVConfig
from saccade.families.registry import load_spec
from saccade.kernels.ops import pick_ops
from saccade.kernels.reference import delta
from saccade.kernels.reference.ops import Ops
from saccade.plugins.cpu.attention import best_isa
from saccade.runtime.weights.checkpoint_weights import load_net
from tests import same_answers
from tests.fixtures.harness import Harness
from tests.fixtures.tiny import make_checkpoint
from tests.same_answers import CACHED, CHATS, CIRCUMSTANCES, ROUNDS

pytestmark = pytest.mark.skipif(
    best_isa() is None, reason="the processor multiplies no bfloat16, or no llvmlite"
)


@pytest.mark.first
@pytest.mark.parametrize(("family", "form"), CACHED)
@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.5, 0.25)], ids=["16", "8", "8 scaled"])
def test_a_hit_has_the_bits_of_its_cold_answer(
    family: str, form: str, scales: tuple[float, float] | None, tmp_path: Path
) -> None:
    model = same_answers.Model.make(tmp_path, family, form)
    if scales is not None:
        layers = model.net.spec.kv_spec().kv_layers
        model = replace(model, kv=KVConfig("fp8_e4m3", (scales,) * layers))
    tally = same_answers.compare_cached(model, 1, family)
    assert tally.compared == CHATS * ROUNDS * (2 + len(CIRCUMSTANCES))
    assert tally.equal == tally.compared and tally.cached > 0


def test_a_worker_whose_states_are_computed_in_chunks_is_not_batch_invariant(
    tmp_path: Path,
) -> None:
    place, dtype = torch.device("cpu"), torch.bfloat16
    ours = pick_ops(place, dtype)

    class Chunked(type(ours)):  # type: ignore[misc]
        sequential_states = False
        state_rows = staticmethod(delta.StateRows.of)
        causal_conv = staticmethod(delta.causal_conv)
        gated_delta = staticmethod(delta.gated_delta)

    def measured(ops: Ops) -> bool:
        net = load_net(load_spec(tmp_path), tmp_path, device=place, dtype=dtype, ops=ops)
        return Harness(net, dtype="bfloat16").worker.batch_invariant

    make_checkpoint(tmp_path, "qwen3_5")
    assert measured(ours) and not measured(Chunked())
