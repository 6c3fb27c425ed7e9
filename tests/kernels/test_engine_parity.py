"""The engine with Triton's kernels in the place of PyTorch's operations, in Triton's interpreter:
the same greedy tokens, whatever is cached, cut into chunks, preempted or in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.qwen import qwen
from saccade.core.config import EncoderConfig, KVConfig, StepGraphSizes
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.kernels import device as placement
from saccade.nn.protocol import FamilyNet
from saccade.runtime import weights
from saccade.runtime.weights import load_net
from saccade.runtime.worker import Step, Worker
from tests.checkpoints import FamilyName, picture
from tests.engine.harness import Harness, Outcome
from tests.families.forwarding import CPU
from tests.kernels.conftest import HAS_GPU
from tests.quantising import FORMATS, quantise

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HAS_GPU, reason="the interpreter stands in for a GPU"),
]

FEW = ("text", "more", "image", "short")
PAGE = 4


@pytest.fixture(scope="module")
def net(family: FamilyName, checkpoint: Callable[..., Path]) -> FamilyNet:
    torch.set_num_threads(1)
    folder = checkpoint(family)
    return load_net(
        load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"), progress=False
    )


def harness(net: FamilyNet, **changes: Any) -> Harness:
    return Harness(net, **{"context_length": 128, "page_size": PAGE, "kv_pages": 257, **changes})


def requests(over: Harness, max_tokens: int = 6) -> list[Request]:
    """Text, an image, both with a shared beginning."""
    spec: Any = over.net.spec
    factor = qwen(spec).image_rules.factor
    shown = over.image(np.ascontiguousarray(picture(3 * factor, 4 * factor, seed=5)), "shown")
    rng = np.random.default_rng(3)
    text = [int(each) for each in rng.integers(5, 60, 21)]
    asked = {"text": text, "more": [*text, 7, 8, 9], "short": text[:2]}
    found = [over.request(n, t, max_tokens=max_tokens) for n, t in asked.items()]
    for name, tokens in (("image", text[:5]), ("image again", text[5:8])):
        tokens = [*text[:2], spec.image_token_id, *tokens]
        found.append(over.request(name, tokens, [shown], max_tokens=max_tokens))
    return found


def tokens(outcomes: Mapping[str, Outcome]) -> dict[str, list[int]]:
    assert all(each.error is None for each in outcomes.values())
    return {name: each.tokens for name, each in outcomes.items()}


def run(over: Harness, asked: Sequence[Request], depth: int) -> dict[str, list[int]]:
    """All of them side by side, with `depth` plans in flight."""
    scheduler, worker = over.scheduler, over.worker
    assert isinstance(worker, Worker)
    outcomes = {request.id: Outcome() for request in asked}
    for request in asked:
        assert not scheduler.add(request)
    begun: deque[Step] = deque()
    while not scheduler.idle or begun:
        over._answer_notices()
        while len(begun) < depth and not (plan := scheduler.plan()).empty:
            begun.append(worker.begin(plan))
        if not begun:
            continue
        for delta in scheduler.apply(begun.popleft().result()):
            over._note(outcomes[delta.id], delta)
    return tokens(outcomes)


@pytest.fixture(scope="module")
def expected(net: FamilyNet) -> dict[str, list[int]]:
    """PyTorch's."""
    plain = harness(net)
    return tokens(plain.run(requests(plain)))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "runs_triton", lambda _: True)


@pytest.mark.parametrize(
    ("changes", "depth"),
    [({}, 1), ({"chunk_tokens": 7, "graphs": StepGraphSizes((2, 8), (0, 2, 8), (8, 16))}, 2)],
    ids=["whole", "chunks, graphs, two in flight"],
)
def test_kernels_answer_as_pytorch_does(
    net: FamilyNet,
    expected: dict[str, list[int]],
    triton: None,
    changes: dict[str, Any],
    depth: int,
) -> None:
    over = harness(net, **changes)
    assert run(over, requests(over), depth) == expected


def test_preempted_sequences_answer_as_pytorch_does(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(placement, "runs_triton", lambda _, on=by_kernels: on)
        over = harness(net, chunk_tokens=16, page_size=2, kv_pages=25, prefix_cache=False)
        asked = requests(over, max_tokens=16)
        found.append(run(over, [each for each in asked if each.id in FEW], 2))
        assert over.scheduler.counts.preemptions
    assert found[0] == found[1]


def test_a_prefix_that_is_cached_is_read_where_it_lies(
    net: FamilyNet, expected: dict[str, list[int]], triton: None
) -> None:
    over = harness(net)
    for _ in range(2):
        outcomes = over.run(requests(over))
        assert tokens(outcomes) == expected
    assert outcomes["more"].cached_tokens and outcomes["image"].levels == ["kv"]
    assert len(over.encoded) == 1


def test_keys_and_values_of_eight_bits_are_near_pytorchs(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sum differs in its last bit, a key may be rounded the other way."""
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(placement, "runs_triton", lambda _, on=by_kernels: on)
        over = harness(net, kv=KVConfig("fp8_e4m3", ((0.5, 0.25),) * net.spec.kv_spec().kv_layers))
        asked = [replace(each, prompt_logprobs=0) for each in requests(over)]
        outcomes = over.run(asked)
        found.append([each[1][0] for name in outcomes for each in outcomes[name].scores])
    off = np.abs(np.array(found[0]) - np.array(found[1]))
    assert np.median(off) < 1e-3 and off.max() < 0.1


@pytest.mark.parametrize("name", ["fp8 blocks of products", "fp8 channels"])
def test_weights_of_eight_bits_answer_as_their_twin(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = []
    folders = quantise(checkpoint("qwen3_vl"), FORMATS[name], tmp_path)
    for folder, by_kernels in zip(folders, (True, False)):
        monkeypatch.setattr(placement, "runs_triton", lambda _, on=by_kernels: on)
        monkeypatch.setattr(weights, "has_fp8", lambda _, on=by_kernels: on)
        net = load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, progress=False)
        over = harness(net, chunk_tokens=32)
        found.append(run(over, requests(over), 1))
    assert found[0] == found[1]


def test_a_tower_in_its_graphs_answers_as_pytorch_does(
    net: FamilyNet, expected: dict[str, list[int]], triton: None
) -> None:
    over = harness(net, encoder=EncoderConfig("triton", (64,)))
    assert run(over, requests(over), 1) == expected
