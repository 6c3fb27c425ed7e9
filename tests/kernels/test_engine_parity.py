"""The engine with Triton's kernels, on a GPU or in Triton's interpreter: the greedy tokens of
PyTorch's operations on a CPU, whatever is cached, cut into chunks, preempted, in flight or in
graphs.

In the interpreter a case takes 20 to 90 s of a loaded core, of the family with experts 45 to 180.
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

from saccade.core.config import EncoderConfig, KVConfig, StepGraphSizes
from saccade.core.types import Request
from saccade.families.registry import load_spec
from saccade.kernels import device as placement
from saccade.kernels.reference.ops import Ops
from saccade.nn.protocol import FamilyNet
from saccade.runtime.inflight_step import Step
from saccade.runtime.weights import checkpoint_weights as weights
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.worker import Worker
from tests.families.every import SEEING
from tests.fixtures.harness import Harness, Outcome
from tests.fixtures.tiny import make_checkpoint, tinies
from tests.helpers.shown import shown_canvas
from tests.kernels.conftest import HAS_GPU
from tests.packing import PACKED, quantise_packed
from tests.quantising import FORMATS, quantise

pytest.importorskip("triton")
from saccade.plugins.gpu.triton.ops import TritonOps

pytestmark = [pytest.mark.gpu if HAS_GPU else pytest.mark.slow, pytest.mark.timeout(600)]

THERE = "cuda" if HAS_GPU else "cpu"
"""Where kernels run; the reference is always on the CPU."""
ON_DEVICE = pytest.mark.skipif(not HAS_GPU, reason="the other cases say as much, and take long")
FEW = ("text", "more", "image", "short")
PAGE = 4


class Interpreted(TritonOps):
    """The interpreter compiles nothing, and would take minutes for the steps of up to 2,048 tokens
    by which a worker compiles beforehand.
    """

    prepare = None


def ops_there() -> Ops:
    """Kernels, as they run where they do."""
    return TritonOps() if HAS_GPU else Interpreted()


def load(folder: Path, kernels: bool = True) -> FamilyNet:
    """Where kernels run, with these; else the reference's, on the CPU."""
    place, ops = (torch.device(THERE), ops_there()) if kernels else (torch.device("cpu"), Ops())
    return load_net(load_spec(folder), folder, dtype=torch.float32, device=place, ops=ops)


@pytest.fixture(scope="module", params=SEEING)
def family(request: pytest.FixtureRequest) -> str:
    """Each in turn; Gemma has windows and images that see themselves in both directions, Gemma 4
    heads of two sizes and layers without keys, DeepSeek-VL2 latents, MiniCPM-V 4.6 rows that become
    one within its tower.
    """
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def net(family: str, checkpoint: Callable[..., Path]) -> FamilyNet:
    """The reference's."""
    torch.set_num_threads(1)
    return load(checkpoint(family), kernels=False)


@pytest.fixture(scope="module")
def there(net: FamilyNet, family: str, checkpoint: Callable[..., Path]) -> FamilyNet:
    """The same, where kernels run."""
    return load(checkpoint(family))


def harness(net: FamilyNet, **changes: Any) -> Harness:
    return Harness(net, **{"context_length": 128, "page_size": PAGE, "kv_pages": 257, **changes})


def with_kernels(net: FamilyNet, **changes: Any) -> Harness:
    return harness(net, device=THERE, **changes)


def fitting(net: FamilyNet, changes: dict[str, Any]) -> dict[str, Any]:
    """The same with chunks that an image fits where one is never cut."""
    spec = net.spec
    least = spec.largest_image.tokens if spec.kv_spec().whole_images else 0
    return {
        name: max(value, least) if name == "chunk_tokens" else value
        for name, value in changes.items()
    }


def requests(over: Harness, max_tokens: int = 6) -> list[Request]:
    """Text, an image, both with a shared beginning."""
    spec: Any = over.net.spec
    canvas, mark = shown_canvas(spec)
    shown = over.image(canvas, "shown")
    rng = np.random.default_rng(3)
    text = [int(each) for each in rng.integers(5, 60, 21)]
    asked = {"text": text, "more": [*text, 7, 8, 9], "short": text[:2]}
    found = [over.request(n, t, max_tokens=max_tokens) for n, t in asked.items()]
    for name, tokens in (("image", text[:5]), ("image again", text[5:8])):
        tokens = [*text[:2], mark, *tokens]
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
        assert not scheduler.add_request(request)
    begun: deque[Step] = deque()
    while not scheduler.idle or begun:
        over._answer_notices()
        while len(begun) < depth and not (plan := scheduler.plan()).empty:
            begun.append(worker.begin_step(plan))
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


GRAPHS = StepGraphSizes((2, 8), (0, 2, 8), (8, 16))


@pytest.mark.parametrize(
    ("changes", "depth"),
    [
        ({}, 1),
        ({"chunk_tokens": 7, "graphs": GRAPHS}, 2),
        pytest.param({"graphs": GRAPHS}, 1, marks=ON_DEVICE),
        pytest.param({"chunk_tokens": 7}, 2, marks=ON_DEVICE),
    ],
    ids=["whole", "chunks, graphs, two in flight", "graphs", "chunks, two in flight"],
)
def test_kernels_answer_as_pytorch_does(
    there: FamilyNet,
    expected: dict[str, list[int]],
    changes: dict[str, Any],
    depth: int,
) -> None:
    over = with_kernels(there, **fitting(there, changes))
    assert run(over, requests(over), depth) == expected


@pytest.mark.parametrize(("variant", "chunk"), [("as 26B-A4B", 9), ("as E2B", 5)])
def test_gemma_4_of_other_sizes_answers_as_pytorch_does(
    tmp_path: Path, variant: str, chunk: int
) -> None:
    """Experts beside MLPs; images that see one way, and are cut where a chunk ends."""
    tiny = tinies()["gemma4"]
    tiny.require()
    folder = make_checkpoint(tmp_path, "gemma4", **tiny.variants[variant])
    found = []
    for by_kernels in (False, True):
        net = load(folder, by_kernels)
        over = with_kernels(net, chunk_tokens=chunk) if by_kernels else harness(net)
        found.append(run(over, requests(over), 2))
    assert found[0] == found[1]


def test_preempted_sequences_answer_as_pytorch_does(
    net: FamilyNet, there: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for by_kernels in (False, True):
        few = {"chunk_tokens": 16, "page_size": 2, "kv_pages": 25, "prefix_cache": False}
        over = with_kernels(there, **few) if by_kernels else harness(net, **few)
        asked = requests(over, max_tokens=16)
        found.append(run(over, [each for each in asked if each.id in FEW], 2))
        assert over.scheduler.counts.preemptions
    assert found[0] == found[1]


def test_a_prefix_that_is_cached_is_read_where_it_lies(
    there: FamilyNet, expected: dict[str, list[int]]
) -> None:
    over = with_kernels(there)
    for _ in range(2):
        outcomes = over.run(requests(over))
        assert tokens(outcomes) == expected
    assert outcomes["more"].cached_tokens and outcomes["image"].levels == ["kv"]
    assert len(over.encoded) == 1


def test_keys_and_values_of_eight_bits_are_near_pytorchs(
    net: FamilyNet, there: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sum differs in its last bit, a key may be rounded the other way."""
    if net.spec.kv_spec().latent:
        pytest.skip("no 8-bit cache of latents")
    found = []
    kv = KVConfig("fp8_e4m3", ((0.5, 0.25),) * net.spec.kv_spec().kv_layers)
    for by_kernels in (False, True):
        over = with_kernels(there, kv=kv) if by_kernels else harness(net, kv=kv)
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
        if not HAS_GPU:
            monkeypatch.setattr(weights, "has_fp8", lambda _, on=by_kernels: on)
        net = load(folder, kernels=by_kernels)
        few = {"chunk_tokens": 32}
        over = with_kernels(net, **few) if by_kernels else harness(net, **few)
        found.append(run(over, requests(over), 1))
    assert found[0] == found[1]


WIDE = {
    "text": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "vision": {"out_hidden_size": 256},
}
"""Sizes of a checkpoint with blocks of 128 in it."""


@pytest.mark.parametrize("name", ["fp8 blocks of 128", "fp8 channels"])
def test_rows_of_eight_bits_are_near_their_twin(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Chunks have more rows than stay as they are; steps that decode have few. On a GPU, whose
    products of 8 bits have results of 16, in those.
    """
    folder = make_checkpoint(tmp_path / "whole", "qwen3_vl", **WIDE)  # type: ignore[arg-type]
    dtype = "bfloat16" if HAS_GPU else "float32"
    found = []
    for at, eight in zip(quantise(folder, FORMATS[name], tmp_path), (True, False)):
        if not HAS_GPU:
            monkeypatch.setattr(weights, "has_fp8", lambda _, on=eight: on)
            monkeypatch.setattr(placement, "multiplies_fp8", lambda *_, on=eight: on)
            monkeypatch.setattr(placement, "multiplies_blocks", lambda _: True)
        place = torch.device(THERE if eight else "cpu")
        kind = getattr(torch, dtype) if eight else torch.float32
        ops = ops_there() if eight else Ops()
        net: Any = load_net(load_spec(at), at, dtype=kind, device=place, ops=ops)
        assert (net.text.layers[0].mlp.group > 0) == eight
        few = {"chunk_tokens": 32, "max_running": 2, "graphs": StepGraphSizes((2,), (0,), (32,))}
        over = with_kernels(net, dtype=dtype, **few) if eight else harness(net)
        asked = [each for each in requests(over, max_tokens=2) if each.id in ("text", "image")]
        outcomes = over.run([replace(each, prompt_logprobs=0) for each in asked])
        found.append([each[1][0] for name in outcomes for each in outcomes[name].scores])
    off = np.abs(np.array(found[0]) - np.array(found[1]))
    assert 1e-4 < np.median(off) < 0.1 and off.max() < 1.0


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_v2 desc_act", "w4a16", "w4a16 actorder"])
def test_weights_of_four_bits_answer_as_their_twin(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = []
    folders = quantise_packed(checkpoint("qwen3_vl"), PACKED[name], tmp_path)
    for folder, by_kernels in zip(folders, (True, False)):
        if not HAS_GPU:
            monkeypatch.setattr(weights, "has_int4", lambda *_, on=by_kernels: on)
        net = load(folder, kernels=by_kernels)
        few = {"chunk_tokens": 32}
        over = with_kernels(net, **few) if by_kernels else harness(net, **few)
        found.append(run(over, requests(over), 1))
    assert found[0] == found[1]


def test_a_tower_in_its_graphs_answers_as_pytorch_does(
    there: FamilyNet, expected: dict[str, list[int]]
) -> None:
    unit = there.spec.patch_unit
    over = with_kernels(there, encoder=EncoderConfig("triton", (-(-64 // unit) * unit,)))
    assert run(over, requests(over), 1) == expected


@pytest.mark.skipif(not HAS_GPU, reason="bfloat16 products are wrong in Triton's interpreter")
def test_graphs_draw_what_plain_steps_do_in_sixteen_bits(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """Padding changes which products are taken, so that the last bits may differ: scores are
    compared, not tokens.
    """
    folder = checkpoint(family)
    place = torch.device("cuda")
    net = load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=place)
    found = []
    for graphs in (StepGraphSizes(), GRAPHS):
        over = with_kernels(net, dtype="bfloat16", graphs=graphs)
        asked = [replace(each, prompt_logprobs=0) for each in requests(over)]
        outcomes = over.run(asked)
        found.append([each[1][0] for name in outcomes for each in outcomes[name].scores])
    off = np.abs(np.array(found[0]) - np.array(found[1]))
    assert np.median(off) < 2e-2 and off.max() < 0.5
