"""A model of transformers' own modules, over pages that Triton's kernels read: on a GPU, or in
Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness
from tests.kernels.conftest import HAS_GPU
from tests.kernels.test_engine_parity import THERE, ops_there
from tests.plugins.any_model.test_transformers_any import load

pytestmark = [pytest.mark.gpu if HAS_GPU else pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = 5


def test_phi_4_multimodal_answers_by_kernels_as_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "phi4"
    served = load("phi4_multimodal", folder)
    place = torch.device(THERE)
    net = load_net(served.spec, folder, dtype=torch.float32, device=place, ops=ops_there())
    over = Harness(net, device=THERE, context_length=512, kv_pages=65)
    names = ("text", "one image")
    asked = [served.request(over, name) for name in names]
    few = [replace(each, sampling=replace(each.sampling, max_tokens=TOKENS)) for each in asked]
    for name, outcome in over.run(few).items():
        assert outcome.error is None
        assert outcome.tokens == served.answers[name][:TOKENS], name
