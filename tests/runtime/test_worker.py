"""A worker's steps: two may be begun before the first is answered, text goes on while an image is
encoded, a mask is waited for at the last moment, and the first rank draws for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets
from saccade.core.plan import Encode, Move, Open, PixelSlot, Plan, Row, Splice, StepResult
from saccade.core.types import Image, ImageKey, SamplingParams, Span
from saccade.families.registry import load_spec
from saccade.nn.family_model import FullNet
from saccade.nn.protocol import Attention, Batch, FamilyNet, LanguageModel
from saccade.plugins.cpu import attention
from saccade.runtime.inflight_step import Step
from saccade.runtime.sampling.sampler import Sampler
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.worker import Worker
from saccade_bench.lab.qwen import qwen
from tests.families.forwarding import CPU, load
from tests.fixtures.harness import CONFIG, Harness, set_threads
from tests.fixtures.rank_group import ThreadRankGroup, together
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.breadth import broad

TEXT = (5, 9, 13, 17, 21)
KEY = ImageKey(b"image".ljust(32, b"\0"), bytes(16))
COUNT = 12
GREEDY = SamplingParams()


@pytest.fixture
def net(checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    return load(checkpoint("qwen3_vl"))


def text_plan(step: int, slot: int = 0, sampling: SamplingParams = GREEDY, **more: object) -> Plan:
    """Step `step` of a text whose prompt is one chunk."""
    length = len(TEXT)
    if step == 0:
        opened = Open(slot, TEXT, length, (), (), sampling, ())
        return Plan(0, open=(opened,), rows=(Row(slot, 0, length, (slot + 1,), True),), **more)  # type: ignore[arg-type]
    pages = (10 + step,) if (length + step - 1) % CONFIG.page_size == 0 else ()
    row = Row(slot, length + step - 1, 1, pages, True)
    return Plan(step, rows=(row,), **more)  # type: ignore[arg-type]


def in_turn(worker: Worker, plans: Sequence[Plan]) -> list[StepResult]:
    return [worker.begin_step(plan).result() for plan in plans]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3, frequency_penalty=1.0, logprobs=2),
    ],
    ids=["greedy", "drawn"],
)
def test_two_plans_may_be_begun_before_the_first_is_answered(
    net: FamilyNet, sampling: SamplingParams
) -> None:
    plans = [text_plan(step, sampling=sampling) for step in range(COUNT)]
    wanted = in_turn(Worker(net, CONFIG, Arena.create(4096)), plans)
    worker = Worker(net, CONFIG, Arena.create(4096))
    begun: list[Step] = []
    found = []
    for plan in plans:
        begun.append(worker.begin_step(plan))
        if len(begun) == 2:
            found.append(begun.pop(0).result())
    found.append(begun.pop().result())
    assert found == wanted
    assert [result.step for result in found] == list(range(COUNT))


class Shown:
    """A worker, an image in its arena, and what shows it."""

    def __init__(self, net: FamilyNet, **changes: object) -> None:
        factor = qwen(net.spec).images.factor
        pixels = picture(7 * factor, 9 * factor, seed=1)
        self.arena = Arena.create(1 << 20)
        slot = PixelSlot(0, *pixels.shape[:2])
        self.arena.view(slot)[:] = pixels
        self.worker = Worker(net, replace(CONFIG, **changes), self.arena)  # type: ignore[arg-type]
        self.grid = qwen(net.spec).images.grid(*pixels.shape[:2])
        self.encode = Encode(KEY, self.grid, net.spec.num_patches(self.grid), slot)
        self.cost = 63 * 4 * net.vision.depth
        placeholder: int = net.spec.image_token_id  # type: ignore[attr-defined]
        self.tokens = (3, *[placeholder] * 63, 4)

    def show(self, step: int, *also: Row) -> Plan:
        """The image's first token is drawn in slot 1."""
        images = (Image(KEY, self.grid, 63, 252, (0, 0)),)
        opened = Open(1, self.tokens, 65, (Span(1, 63, 0),), images, SamplingParams(), ())
        row = Row(1, 0, 65, (20, 21, 22, 23, 24), True)
        splice = Splice(1 + sum(each.length for each in also), 63, KEY, 0)
        return Plan(step, open=(opened,), rows=(*also, row), splices=(splice,))


def test_text_goes_on_while_an_image_is_encoded(net: FamilyNet) -> None:
    at_once = Shown(net)
    at_once.worker.begin_step(Plan(0, encode=(at_once.encode,))).result()
    (wanted,) = at_once.worker.begin_step(at_once.show(1)).result().tokens
    alone = Worker(net, CONFIG, Arena.create(4096))
    text = [result.tokens for result in in_turn(alone, [text_plan(n) for n in range(COUNT)])]

    shown = Shown(net)
    steps = 8
    tower = -(-shown.cost // steps)
    found = [shown.worker.begin_step(text_plan(0)).result().tokens]
    ended = 0
    for step in range(1, steps + 1):
        begins = (shown.encode,) if step == 1 else ()
        result = shown.worker.begin_step(text_plan(step, encode=begins, tower=tower)).result()
        found.append(result.tokens)
        assert [key for key, _, _ in result.encoded] == ([KEY] if step == steps else [])
        ended += len(result.encoded)
    assert ended == 1, f"{steps - 1} tokens of text before the image was there"
    decode = text_plan(steps + 1).rows[0]
    token, first = shown.worker.begin_step(shown.show(steps + 1, decode)).result().tokens
    assert [*found, (token,)] == text[: steps + 2]
    assert first == wanted


def test_an_image_that_is_to_be_saved_is_saved_once_it_is_encoded(
    net: FamilyNet, tmp_path: Path
) -> None:
    budgets = EmbeddingBudgets(1 << 20, 0, 1 << 20, str(tmp_path))
    shown = Shown(net, embeddings=budgets)
    shown.worker.begin_step(Plan(0, encode=(shown.encode,), tower=1, save=(KEY,))).result()
    assert shown.worker.begin_step(Plan(1)).result().encoded
    shown.worker.close()
    again = Shown(net, embeddings=budgets)
    assert again.worker.images.saved == ((KEY, 63),)
    step = again.worker.begin_step(Plan(0, moves=(Move(KEY, "disk", "staged", 63),), wait=True))
    assert step.result().disk == ((KEY, "read"),)
    again.worker.begin_step(Plan(1, moves=(Move(KEY, "staged", "device", 63),))).result()
    other = Shown(net)
    other.worker.begin_step(Plan(0, encode=(other.encode,))).result()
    wanted = other.worker.begin_step(other.show(1)).result().tokens
    assert again.worker.begin_step(again.show(2)).result().tokens == wanted
    again.worker.close()


def test_a_plan_that_waits_for_nothing_returns(net: FamilyNet) -> None:
    step = Worker(net, CONFIG, Arena.create(4096)).begin_step(Plan(0, wait=True))
    assert step.ready() and step.result() == StepResult(0)


def test_a_mask_is_asked_for_after_the_row_is_computed(
    net: FamilyNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(net, CONFIG, Arena.create(4096))
    order = []
    forward = type(net).forward
    monkeypatch.setattr(
        type(net), "forward", lambda *args: (order.append("computed"), forward(*args))[1]
    )

    def masks() -> np.ndarray:
        order.append("asked for")
        mask = np.zeros((1, -(-net.spec.vocab_size // 32)), np.int32)
        mask[0, 77 // 32] = 1 << 77 % 32
        return mask

    plan = text_plan(0)
    plan = replace(plan, rows=(replace(plan.rows[0], masked=True),))
    assert worker.begin_step(plan, masks).result().tokens == (77,)
    assert order == ["computed", "asked for"]


class Useless:
    """A language model whose logits say nothing."""

    def __init__(self, text: LanguageModel) -> None:
        self._text = text
        self.hidden = text.hidden

    def __call__(self, batch: Batch, attention: Attention) -> torch.Tensor:
        return self._text(batch, attention)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return torch.full_like(self._text.normed(states), torch.nan)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.full_like(self._text.logits(states), torch.nan)


def test_the_first_rank_draws_for_all(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others would have drawn: they do not."""
    set_threads()
    rank_group = ThreadRankGroup(checkpoint("qwen3_vl"), 2, "weights")
    sampling = SamplingParams(temperature=1.0, seed=5)
    plans = [text_plan(step, sampling=sampling) for step in range(COUNT)]
    wanted = in_turn(Worker(load(checkpoint("qwen3_vl")), CONFIG, Arena.create(4096)), plans)
    drawn: list[int] = []
    sample = Sampler.__call__
    monkeypatch.setattr(
        Sampler,
        "__call__",
        lambda self, logits, draws, *rest: (
            drawn.append(len(logits)),
            sample(self, logits, draws, *rest),
        )[1],
    )
    first, second = rank_group.nets
    assert isinstance(second, FullNet)
    nets = [first, replace(second, text=Useless(second.text))]
    workers = together(
        lambda net, shard: Worker(net, CONFIG, Arena.create(4096), shard), nets, rank_group.shards
    )
    for plan, expected in zip(plans, wanted):
        results = together(lambda worker, plan=plan: worker.begin_step(plan).result(), workers)
        assert [result.tokens for result in results] == [expected.tokens] * 2
    assert len(drawn) == COUNT


@pytest.mark.parametrize(
    "family",
    broad(["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], keep=["qwen3_vl", "qwen3_5_moe"]),
)
def test_every_kind_of_layer_decodes_in_bfloat16(
    checkpoint: Callable[..., Path], family: str
) -> None:
    """There, a CPU has kernels of its own, for one row and for several."""
    set_threads()
    folder = checkpoint(family)
    net = load_net(load_spec(folder), folder, dtype=torch.bfloat16, device=CPU)
    over = Harness(net, dtype="bfloat16", max_running=3)
    outcomes = over.run([over.request(str(at), [5 + at, 6, 7], max_tokens=4) for at in range(3)])
    assert [len(each.tokens) for each in outcomes.values()] == [4] * 3


def test_a_worker_has_what_long_attention_needs_compiled(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []
    net = load(checkpoint("qwen3_vl"))
    monkeypatch.setattr(net.ops, "precompile", lambda like: asked.append(like.dtype))
    Worker(net, CONFIG, Arena.create(4096))
    assert asked == [torch.float32]


@pytest.mark.skipif(attention.best_isa() is None, reason="no products of bfloat16 here")
def test_the_first_image_waits_for_no_code_of_the_towers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_vl", vision={"num_heads": 1})
    spec = load_spec(folder)
    net = load_net(spec, folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    attention.functions.cache_clear()
    harness = Harness(net, dtype="bfloat16")
    begun = attention.functions.cache_info().misses
    image = harness.image(picture(256, 256), "a")
    tokens = [1, 2, qwen(net.spec).image_token_id, 3]
    harness.run([harness.request("r", tokens, [image], max_tokens=2)])
    assert harness.encoded == [image.key]
    now = attention.functions.cache_info()
    assert now.misses == begun and now.hits, "made before, and used"
