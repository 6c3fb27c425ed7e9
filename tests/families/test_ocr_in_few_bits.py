"""PaddleOCR-VL and GLM-OCR in 8 and 4 bits: every matrix of their language models is found, and
answers stay close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from saccade.families.registry import load_spec
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.weights.quant_policy import LoadTally
from saccade_bench.fixtures.tiny import Reference
from tests.families.forwarding import CPU, Session, pixels, prompt
from tests.helpers.processor import needs_vnni

HALF = torch.bfloat16
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}


@needs_vnni
@pytest.mark.parametrize(("mode", "furthest"), [("int8", 0.06), ("int4", 0.4)])
@pytest.mark.parametrize(
    ("family", "vision"), [("paddleocr_vl", {}), ("glm_ocr", {"out_hidden_size": 256})]
)
def test_matrices_of_few_bits_answer_nearly_as_whole_ones(
    reference: Callable[..., Reference],
    family: str,
    vision: dict[str, Any],
    mode: Literal["int8", "int4"],
    furthest: float,
) -> None:
    theirs = reference(family, text=SIZES, vision=vision)
    spec, tally, images = load_spec(theirs.folder), LoadTally(), pixels(theirs, 1)
    net = load_net(spec, theirs.folder, dtype=HALF, device=CPU, quantization=mode, tally=tally)
    session = Session(net, prompt(theirs, 1), images, 16, HALF)
    found, exact = session.prefill().float(), theirs.logits(session.tokens, images)
    assert 0 < (found - exact).norm() / exact.norm() < furthest
    products = 4 * spec.kv_spec().kv_layers + (mode == "int8")  # with the head
    assert f"{products} matrices of the language model in {mode}" in tally.line(HALF)
