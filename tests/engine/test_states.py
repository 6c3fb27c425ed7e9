"""A model that keeps a state per sequence finds nearly as much of a chat again as one that keeps
only pages, from snapshots that never take more memory than they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from saccade.core.config import MIB, EngineConfig, Hardware, SnapshotConfig
from saccade.core.errors import ConfigError
from saccade.core.options import CacheOptions, EngineOptions, ModelOptions
from saccade.core.settings import DraftSettings, EngineSettings, ParallelSettings
from saccade.core.types import Request
from saccade.engine.process import draft_tokens
from saccade.engine.ranks import resolve_parallel
from saccade.engine.sizing import MAX_DRAFT_TOKENS, count_between, kv_page_bytes, resolve
from saccade.engine.startup_report import LoadInfo, describe
from saccade.nn.protocol import FamilyNet
from saccade.plugins.snapshots.snapshot_scheduler import ANSWER_TOKENS
from saccade.runtime.worker import Worker
from saccade_bench.lab.qwen import qwen
from tests.families import answers
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.tiny import Reference, picture

ROUNDS, NEW, PAGE = 8, 20, 16


@pytest.fixture(
    scope="module", params=["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def family(request: pytest.FixtureRequest) -> str:
    """Each whose language model keeps states."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def net(family: str, checkpoint: Callable[..., Path]) -> FamilyNet:
    set_threads()
    return load(checkpoint(family))


def pixels(number: int) -> np.ndarray:
    return picture(64, 64 + 32 * (number % 3), seed=number)


def ask(harness: Harness, history: Sequence[int], rounds: int) -> Request:
    """The next turn of a chat; `history` has a placeholder for each of the pictures before."""
    images = [harness.image(pixels(number), f"p{number}") for number in range(rounds)]
    return harness.request(f"r{rounds}", history, images, max_tokens=NEW)


def chat(harness: Harness, rounds: int = ROUNDS) -> list[tuple[list[int], int, list[int]]]:
    """(prompt with placeholders, cached tokens, answer) of each round, which shows one new
    picture.
    """
    placeholder = qwen(harness.net.spec).image_token_id
    history: list[int] = []
    turns = []
    for number in range(1, rounds + 1):
        question = [30 + number, *range(40, 40 + 5 * number)]
        history = [*history, 11, 12, placeholder, *question, 13]
        outcome = harness.run([ask(harness, history, number)])[f"r{number}"]
        turns.append((list(history), outcome.cached_tokens, outcome.tokens))
        history += [token if token != placeholder else 14 for token in outcome.tokens]
    return turns


def test_a_chat_finds_its_rounds_again(net: FamilyNet, checkpoint: Callable[..., Path]) -> None:
    """As those of attention alone, within a snapshot's distance; and each round is answered as by
    an engine that has seen nothing.
    """
    harness = Harness(net, page_size=PAGE)
    turns = chat(harness)
    plain = Harness(load(checkpoint("qwen3_vl")), page_size=PAGE)
    whole = [cached for _, cached, _ in chat(plain)]
    cached = [cached for _, cached, _ in turns]
    assert whole[-1] > 200, "the prompts are long enough to tell"
    for mine, theirs in zip(cached, whole, strict=True):
        assert theirs - ANSWER_TOKENS <= mine <= theirs
    assert len(harness.encoded) == len(set(harness.encoded)) == ROUNDS, "each picture once"
    for number in (2, ROUNDS):
        prompt, _, answer = turns[number - 1]
        cold = Harness(net, page_size=PAGE, prefix_cache=False, max_running=1)
        assert cold.run([ask(cold, prompt, number)])[f"r{number}"].tokens == answer
    again = harness.run([ask(harness, turns[-1][0], ROUNDS)])[f"r{ROUNDS}"]
    assert again.tokens == turns[-1][2]
    length = len(ask(harness, turns[-1][0], ROUNDS).tokens)
    assert again.cached_tokens == (length - 1) // PAGE * PAGE


def test_a_preempted_chat_is_answered_as_any_other(net: FamilyNet) -> None:
    """Two that share nothing, for whose prompts there is room, and not for both answers."""
    prompt, _, answer = chat(Harness(net, page_size=PAGE), 3)[-1]
    request = ask(Harness(net), prompt, 3)
    longer = replace(request, sampling=replace(request.sampling, max_tokens=3 * NEW))
    pages = 2 * -(-(len(request.tokens) + NEW) // 4) + 1
    few = Harness(net, page_size=4, kv_pages=pages)
    ask(few, prompt, 3)
    outcomes = few.run([replace(longer, id=salt, cache_salt=salt) for salt in ("a", "b")])
    assert few.scheduler.counts.preemptions > 0
    assert [each.tokens[:NEW] for each in outcomes.values()] == [answer] * 2
    assert outcomes["a"].tokens == outcomes["b"].tokens


def test_answers_are_those_of_transformers(
    net: FamilyNet,
    family: str,
    checkpoint: Callable[..., Path],
    reference: Callable[..., Reference],
) -> None:
    """In chunks, with an image cut by one, side by side; again from the cache; and preempted."""
    tokenizer = Tokenizer.from_file(str(checkpoint(family) / "tokenizer.json"))
    bare = answers.Model(net, tokenizer, reference(family), {})
    asked = ("text", "three turns")
    told = {name: answers.reference_answer(bare, answers.CASES[name]) for name in asked}
    model = replace(bare, answers=told)
    harness = Harness(net, chunk_tokens=16)
    for _ in range(2):
        answers.check(model, harness.run([model.request(harness, name) for name in asked]))
    few = Harness(net, chunk_tokens=16, page_size=4, kv_pages=28)
    names = ("three turns", "three turns#again")
    twice = [replace(model.request(few, asked[1]), id=name) for name in names]
    answers.check(model, few.run(twice))
    assert few.scheduler.counts.preemptions > 0


@pytest.mark.first
@pytest.mark.parametrize("snapshots", [1, 3])
def test_few_snapshots_change_no_answer(net: FamilyNet, snapshots: int) -> None:
    harness = Harness(net, page_size=PAGE, snapshots=SnapshotConfig(snapshots, 256))
    assert isinstance(harness.worker, Worker)
    prefix = harness.scheduler.prefix
    assert prefix is not None and prefix.snapshots is not None
    wanted = [answer for _, _, answer in chat(Harness(net, page_size=PAGE), 4)]
    assert [answer for _, _, answer in chat(harness, 4)] == wanted
    assert prefix.snapshots.evictions > 0
    assert len(prefix.snapshots) <= snapshots


def test_states_take_the_memory_that_was_counted(net: FamilyNet) -> None:
    harness = Harness(net, max_running=3, snapshots=SnapshotConfig(5, 256, 4))
    assert isinstance(harness.worker, Worker) and harness.worker.states is not None
    each = net.spec.kv_spec().state_bytes("float32")
    assert harness.worker.states.nbytes == (3 + 5 + 4) * each


def test_twins_share_a_prompt_that_is_being_computed(net: FamilyNet) -> None:
    """The second waits for the first one's snapshot, and computes what is after it alone."""
    harness = Harness(net, page_size=PAGE, chunk_tokens=32)
    prompt = [int(token) for token in np.random.default_rng(0).integers(5, 300, 150)]
    twins = [harness.request(name, prompt, max_tokens=4) for name in ("a", "b")]
    outcomes = harness.run(twins)
    assert outcomes["a"].tokens == outcomes["b"].tokens
    assert outcomes["b"].cached_tokens == 144


def test_without_snapshots_the_prefix_cache_is_off(net: FamilyNet) -> None:
    harness = Harness(net, snapshots=SnapshotConfig(0, 256))
    assert harness.scheduler.prefix is None
    assert [cached for _, cached, _ in chat(harness, 2)] == [0, 0]


@pytest.mark.parametrize(("free", "running"), [(2, None), (64, None), (2, 30)])
def test_pages_states_and_snapshots_share_the_memory(
    net: FamilyNet, free: int, running: int | None
) -> None:
    """Of `free` MiB; what is decided is said. Where slots leave too little, the prefix cache is
    off.
    """
    config = decide(net, free, running)
    each, page = net.spec.kv_spec().state_bytes("float32"), kv_page_bytes(net.spec, PAGE, "float32")
    between = config.snapshots.between
    states = (config.max_running + config.snapshots.lines) * each
    assert states + config.kv_pages * page <= 0.5 * free * MIB
    assert between * each <= 0.5 * free * MIB / 8
    assert 1 <= config.max_running <= 32
    assert config.prefix_cache == (config.snapshots.count > 0) == (running is None)
    hardware, parallel = machine(free), resolve_parallel(ParallelSettings(), net.spec, "cpu")
    said = dict(describe(config, parallel, net.spec, hardware, LoadInfo((), "", 0, 7)))
    mib = between * each / MIB
    taken = f", {between} states after draft tokens = {mib:.0f} MiB" if between else ""
    assert said["speculation"] == f"up to 7 tokens{taken}" and bool(between) == (running is None)
    assert said["states"].startswith(f"{each / MIB:.1f} MiB")
    on = f"on, {config.snapshots.count} snapshots of states"
    assert said["prefix cache"].startswith(on if running is None else "off")


@pytest.mark.parametrize("change", ["", "off", "auto", "cuda"])
def test_states_between_guesses_have_memory_only_where_they_are_needed(
    net: FamilyNet, change: str
) -> None:
    """Where nothing is guessed after all, the lines are snapshots'."""
    drafts = DraftSettings("always" if change in ("", "cuda") else change)  # type: ignore[arg-type]
    each = net.spec.kv_spec().state_bytes("float32")
    lines = count_between(drafts, each, 1 << 30, cuda=change == "cuda")
    assert lines == (0 if change else 2 * MAX_DRAFT_TOKENS)
    config = decide(net, 64, None)
    config = replace(config, snapshots=replace(config.snapshots, between=lines))
    if change == "cuda":
        config = replace(config, device="cuda")
    most, why = draft_tokens(drafts, config, net.spec, batch_invariant=True)
    said = {"": "", "off": " off", "auto": " always", "cuda": "only supported on CPUs"}[change]
    assert (most > 0) == (not change) and said in why
    before = config.snapshots.count + lines
    assert (
        config.snapshots.without_drafts.count == before
        and not config.snapshots.without_drafts.between
    )


def test_more_requests_than_states_have_room_are_refused(net: FamilyNet) -> None:
    with pytest.raises(ConfigError, match=r"--max-running-requests 64: the state of a sequence"):
        decide(net, 2, 64)


def machine(free: int) -> Hardware:
    return Hardware("cpu", "2 threads", 2 * free * MIB, free * MIB)


def decide(net: FamilyNet, free: int, running: int | None) -> EngineConfig:
    engine = EngineOptions(chunked_prefill_size=16, max_running_requests=running)
    settings = EngineSettings(drafts=DraftSettings("always"))
    caches = CacheOptions(embedding_cache_device_mb=1)
    return resolve(ModelOptions(), engine, net.spec, "float32", machine(free), 1, caches, settings)
