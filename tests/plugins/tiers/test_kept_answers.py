"""KV pages that left the pool, or the process, come back from disk: the answers are transformers',
whatever the tiers hold, and nothing is computed or encoded that a file has.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.core.config import KVConfig, PageTierConfig
from saccade.core.errors import ConfigError, StartupError
from saccade.core.plan import PageOutcome, PageTier, StepResult
from saccade.core.store import PAGE_FILES
from saccade.core.types import CacheMiss, Caching, Delta
from saccade.families.registry import load_spec
from saccade.plugins.tiers import disk
from saccade.plugins.tiers.disk import Folder
from saccade.plugins.tiers.kept_pages import CacheTierState
from saccade.plugins.tiers.options import TierOptions
from saccade.plugins.tiers.page_arrivals import ReadRates
from saccade.runtime.tiers import Ready
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.engine import test_kv_eight_bits as eight_bits
from tests.families.answers import CASES, Model, check
from tests.families.every import OFTEN
from tests.fixtures.harness import Harness, Outcome
from tests.fixtures.rank_group import ThreadRankGroup, ThreadWorkers
from tests.helpers.page_tiers import arrivals_of, kept_of

MODEL = b"sixteen bytes of"
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (*OFTEN, "gemma4")
    if name not in ("qwen3_vl", "qwen3_5")
]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5", *SLOW])
def model(request: pytest.FixtureRequest, answered: Callable[[str], Model]) -> Model:
    return answered(request.param)


def on_disk(folder: Path, nbytes: int) -> PageTierConfig:
    return PageTierConfig(str(folder), nbytes, MODEL)


def open_engine(model: Model, folder: Path, disk_bytes: int = 1 << 30, **changes: Any) -> Harness:
    harness = Harness(model.net, kv=KVConfig(pages=on_disk(folder, disk_bytes)), **changes)
    patient(harness)
    return harness


def patient(harness: Harness) -> None:
    """However quick a tiny model computes, reads are waited for."""
    arrivals_of(harness.scheduler).rates = Unmeasured()


class Unmeasured(ReadRates):
    def computed(self, tokens: int, seconds: float) -> None: ...


def kept(harness: Harness, tier: PageTier = "disk") -> CacheTierState:
    return kept_of(harness.scheduler).tiers[tier]


def evict(harness: Harness) -> None:
    """Every page that nobody holds, out of the pool."""
    prefix = harness.scheduler.prefix
    assert prefix is not None
    prefix.evict(prefix.evictable)
    harness.run([])


def run(harness: Harness, model: Model, *names: str) -> Mapping[str, Outcome]:
    outcomes = harness.run([model.request(harness, name) for name in names or CASES])
    check(model, outcomes)
    return outcomes


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if PAGE_FILES.file.fullmatch(path.name))


@pytest.mark.more
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_restart_computes_only_what_no_page_holds(
    model: Model, tmp_path: Path, page_size: int
) -> None:
    first = open_engine(model, tmp_path, page_size=page_size)
    run(first, model)
    warm = run(first, model)
    first.close()
    again = open_engine(model, tmp_path, page_size=page_size)
    for name in CASES:
        outcome = run(again, model, name)[name]
        assert outcome.cached_tokens == warm[name].cached_tokens
        found = [level == "kv" for level in outcome.levels]
        assert found == [level == "kv" for level in warm[name].levels]
        assert {tier for tier, kv in zip(outcome.tiers, found) if kv} <= {"disk"}
    if page_size == 1:
        assert again.encoded == again.decoded == [], "every image lies before the last token"
    assert kept(again).counts["read"] > 0 and kept(again).counts["damaged"] == 0
    again.close()


@pytest.mark.more
@pytest.mark.parametrize("nbytes", [1 << 30, 40_000, 4096])
@pytest.mark.parametrize(
    ("page_size", "chunk_tokens"),
    [(16, 2048), pytest.param(1, 16, marks=pytest.mark.slow), (16, 16)],
)
def test_what_makes_room_comes_back(
    model: Model, tmp_path: Path, page_size: int, chunk_tokens: int, nbytes: int
) -> None:
    """In a pool that holds hardly more than one prompt, with and without room on disk."""
    longest = max(len(model.request(Harness(model.net), name).tokens) for name in CASES)
    engine = open_engine(
        model,
        tmp_path,
        page_size=page_size,
        kv_pages=(longest + 48) // page_size + 4,
        chunk_tokens=chunk_tokens,
        disk_bytes=nbytes,
    )
    for _ in range(2):
        run(engine, model)
        for name in CASES:
            run(engine, model, name)
    counts, prefix = kept(engine).counts, engine.scheduler.prefix
    assert prefix is not None and prefix.evictions > 0
    assert counts["read"] > 0 or nbytes < 1 << 30
    assert counts["read"] == 0 or nbytes > 4096
    assert not (counts["damaged"] or counts["missing"] or counts["not read"])
    engine.close()
    taken = sum(path.stat().st_size for path in files(tmp_path))
    assert taken <= nbytes, "files are what the book says"


@pytest.mark.more
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("host_pages", [4, 1000])
@pytest.mark.parametrize("files", [False, True], ids=["", "disk"])
def test_what_makes_room_comes_back_from_host_memory(
    model: Model, tmp_path: Path, page_size: int, host_pages: int, files: bool
) -> None:
    """In a pool for one prompt, with room for few pages beside it, or for all."""
    plain = Harness(model.net, page_size=page_size)
    longest = max(len(model.request(plain, name).tokens) for name in CASES)
    spec = plain.net.spec.kv_spec()
    each = page_size * spec.token_bytes("float32")
    state = spec.state_bytes("float32")
    room = host_pages * each + (state > 0) * (host_pages // 2) * (state + 2 * each)
    tiers = PageTierConfig(
        str(tmp_path) if files else None, (1 << 30) * files, MODEL, host_bytes=room
    )
    pages = (longest + 48) // page_size + 4
    engine = Harness(model.net, kv=KVConfig(pages=tiers), page_size=page_size, kv_pages=pages)
    patient(engine)
    for _ in range(2):
        run(engine, model)
        for name in CASES:
            run(engine, model, name)
    host, used = kept(engine, "host"), kept_of(engine.scheduler).tiers
    assert host.counts["saved"] > 0 and host.book.used_bytes <= room
    assert host.counts["read"] > 0 or host_pages == 4
    assert (host.book.evictions > 0) == (host_pages == 4)
    if files:
        few = host_pages == 4
        assert (used["disk"].counts["read"] > 0) == few, "the quickest tier is read"
    engine.close()


@pytest.mark.first
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", ""])
def test_what_a_client_pins_outlives_pressure_in_host_memory(model: Model, pinned: bool) -> None:
    """With its states, though its pins on the device gave way long before. What nobody pinned has
    gone.
    """
    plain, name = Harness(model.net), "three pictures"
    length, spec = len(model.request(plain, name).tokens), plain.net.spec.kv_spec()
    each = plain.config.page_size * spec.token_bytes("float32")
    state = spec.state_bytes("float32")
    room = 2 * (length // plain.config.page_size * each + (state > 0) * 8 * (state + 2 * each))
    engine = Harness(model.net, kv=KVConfig(pages=PageTierConfig(host_bytes=room)))
    patient(engine)
    marks = ((length - 1, 300),) if pinned else ()
    asked = replace(model.request(engine, name), client="a", caching=Caching(marks))
    engine.run([asked])
    warm = run(engine, model, name)[name].cached_tokens
    evict(engine)
    host = kept(engine, "host")
    for salt in map(str, range(40)):
        if host.book.evictions * each > 2 * room:
            break
        others = [model.request(engine, other) for other in CASES if other != name]
        check(model, engine.run([replace(other, cache_salt=salt) for other in others]))
        evict(engine)
    assert host.book.evictions * each > 2 * room and not len(host.book.held)
    again = run(engine, model, name)[name]
    assert again.cached_tokens == (warm if pinned else 0)
    assert host.pinned.book.given_way == 0
    engine.close()


HARM = ("cut", "a value", "a header", "swapped", "another model's", "gone", "a folder", "a pipe")


@pytest.mark.first
@pytest.mark.parametrize("how", ["a value", "gone", "a folder", "a pipe"])
def test_damaged_files_are_computed_again_and_counted(
    model: Model, tmp_path: Path, how: str
) -> None:
    first = open_engine(model, tmp_path)
    run(first, model)
    first.close()
    again = open_engine(model, tmp_path)
    found = files(tmp_path)
    for one, other in zip(found[::2], found[1::2]):
        for path in (one, other):
            harm(path, how, other if path is one else one)
    outcomes = run(again, model)
    assert all(outcome.cached_tokens == 0 for outcome in outcomes.values()) or len(found) % 2
    counts = kept(again).counts
    deadline = time.monotonic() + 20
    while how == "a folder" and not counts["not saved"]:  # a thread tells, with a later step
        assert time.monotonic() < deadline
        run(again, model)
    expected: PageOutcome = "missing" if how == "gone" else "damaged"
    assert counts[expected] > 0 and bool(counts["not saved"]) == (how == "a folder")
    again.close()
    third = open_engine(model, tmp_path)
    assert run(third, model)["text"].error is None
    third.close()


def harm(path: Path, how: str, other: Path) -> None:
    data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    match how:
        case "cut":
            path.write_bytes(data[:-1])
        case "a value":
            data[-7] ^= 4
            path.write_bytes(data)
        case "a header":
            path.write_bytes(b"\xff" * 16 + data[16:])
        case "swapped" if path < other:
            spare = path.with_suffix(".spare")
            path.rename(spare)
            other.rename(path)
            spare.rename(other)
        case "another model's":
            path.write_bytes(data.replace(MODEL.hex().encode(), MODEL[::-1].hex().encode()))
        case "gone" | "a folder" | "a pipe":
            path.unlink()
            if how == "a folder":
                path.mkdir()
            elif how == "a pipe":
                os.mkfifo(path)


@pytest.mark.once("model")
def test_a_disk_that_takes_nothing_costs_computing_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, or read-only: each page is counted, and none is found."""
    engine = open_engine(model, tmp_path, kv_pages=40)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "put", refuse)
    for _ in range(2):
        run(engine, model)
    engine.close()
    assert kept(engine).counts["read"] == 0 and files(tmp_path) == []
    assert kept(engine).counts["not saved"] > 0


@contextmanager
def refusing(folder: Path, how: str) -> Iterator[None]:
    """What the files of `folder` meet, whoever runs this: modes of files are nothing to root."""
    if how == "a file in its place":
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.touch()
        yield
        folder.unlink()
        aside.rename(folder)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.more
@pytest.mark.once("model")
@pytest.mark.parametrize("how", ["reads alone", "a file in its place"])
def test_a_folder_that_takes_no_file_costs_computing_alone(
    model: Model, tmp_path: Path, how: str
) -> None:
    """Of a running server, and nothing is patched: what is there is read where it can be, nothing
    new is saved, and each page is counted; once the folder takes files again, it is as before.
    """
    engine = open_engine(model, tmp_path, kv_pages=40)
    counts, salts = kept(engine).counts, map(str, count())
    run(engine, model)
    evict(engine)
    (folder,) = tmp_path.glob("kv-*")
    deadline = time.monotonic() + 20
    while len(files(tmp_path)) < len(kept(engine).book):  # a thread writes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = counts["read"]
    with refusing(folder, how):
        while not counts["not saved"]:  # a thread tells, with a later step
            assert time.monotonic() < deadline
            run(engine, model)
            salt = next(salts)
            asked = [replace(model.request(engine, name), cache_salt=salt) for name in CASES]
            check(model, engine.run(asked))
            evict(engine)
        readable = how == "reads alone"
        assert (counts["read"] > before) == readable != (counts["not read"] > 0)
    assert counts["damaged"] == counts["missing"] == 0
    for _ in range(2):
        run(engine, model)
        evict(engine)
    engine.close()
    again = open_engine(model, tmp_path)
    run(again, model)
    counts = kept(again).counts
    assert counts["read"] > 0 and not (counts["damaged"] or counts["missing"])
    again.close()


@pytest.mark.once("model")
def test_a_slow_disk_is_not_waited_for(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once both are measured, pages whose reading takes longer than computing them are late, or
    not even asked for; what came in time is used.
    """
    first = open_engine(model, tmp_path)
    run(first, model)
    first.close()
    load = Folder.get

    def slowly(*args: Any) -> tuple[torch.Tensor, Ready]:
        time.sleep(0.03)
        return load(*args)

    monkeypatch.setattr(Folder, "get", slowly)
    again = open_engine(model, tmp_path)
    arrivals_of(again.scheduler).rates = rates = ReadRates(token_seconds=1e-5)
    run(again, model)
    counts = kept(again).counts
    assert counts["late"] + counts["slow"] > 0 and rates.byte_seconds["disk"] > 0
    assert counts["damaged"] == counts["missing"] == 0
    again.close()


@pytest.mark.once("model")
@pytest.mark.parametrize("page_seconds", [0.0, 1.0])
def test_a_miss_tells_what_was_evicted_from_what_is_read_too_slowly(
    model: Model, tmp_path: Path, page_seconds: float
) -> None:
    """Decided by what was measured: a page is read if that takes less than computing it, and what
    is not read is told, and counted.
    """
    name = "three pictures"
    engine = open_engine(model, tmp_path)
    arrivals, prefix = arrivals_of(engine.scheduler), engine.scheduler.prefix
    assert prefix is not None
    asked = replace(model.request(engine, name), caching=Caching(diagnose=True))
    engine.run([asked])
    prefix.evict(prefix.evictable)
    engine.run([])
    rates = arrivals.rates = Unmeasured(token_seconds=1.0 / engine.config.page_size / 2)
    rates.byte_seconds = {"disk": page_seconds / kept_of(engine.scheduler).page_bytes}
    told: list[CacheMiss | None] = []
    note = engine.scheduler.apply

    def listen(result: StepResult) -> list[Delta]:
        deltas = note(result)
        told.extend(delta.caching.missed for delta in deltas if delta.caching)
        return deltas

    engine.scheduler.apply = listen  # type: ignore[method-assign]
    again = engine.run([replace(asked, id="again")])["again"]
    (missed,) = told
    if page_seconds:
        assert missed is not None and missed.reason == "read_too_slow"
        assert again.cached_tokens == kept(engine).counts["read"] == 0
        assert kept(engine).counts["slow"] > 0
        assert rates.byte_seconds["disk"] < page_seconds / kept_of(engine.scheduler).page_bytes, (
            "less sure"
        )
    else:
        assert missed is None and again.cached_tokens > 0 and not kept(engine).counts["slow"]
    engine.close()


@pytest.mark.first
def test_another_salt_finds_nothing_and_a_flush_forgets_all(model: Model, tmp_path: Path) -> None:
    first = open_engine(model, tmp_path)
    run(first, model)
    first.close()
    assert files(tmp_path)
    again = open_engine(model, tmp_path)
    name = "three pictures"
    stranger = replace(model.request(again, name), cache_salt="another tenant")
    assert again.run([stranger])[name].cached_tokens == kept(again).counts["read"] == 0
    again.scheduler.flush(embeddings=False)
    assert run(again, model, name)[name].cached_tokens == 0
    again.scheduler.flush(embeddings=False)
    again.run([])
    again.close()
    assert files(tmp_path) == []


@pytest.mark.once("model")
def test_a_folder_is_one_servers_and_nobody_elses(model: Model, tmp_path: Path) -> None:
    first = open_engine(model, tmp_path / "kv")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(disk, "LOCK_SECONDS", 0.1)
    with pytest.raises(StartupError, match="another server of this model uses it"):
        open_engine(model, tmp_path / "kv")
    monkey.undo()
    first.close()
    strange = tmp_path / "letters"
    strange.mkdir()
    (strange / "to a friend.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"another program uses it"):
        TierOptions(kv_cache_dir=str(strange))
    with pytest.raises(StartupError, match="another program uses it"):
        open_engine(model, strange)
    assert [path.name for path in strange.iterdir()] == ["to a friend.txt"]
    other = Harness(
        model.net, kv=KVConfig(pages=PageTierConfig(str(tmp_path / "kv"), 1, bytes(16)))
    )
    other.close()
    assert files(tmp_path / "kv") == [], "what was served before is removed"


def test_pages_of_eight_bits_come_back_as_they_were(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_vl")
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    eight = KVConfig("fp8_e4m3", pages=on_disk(tmp_path, 1 << 30))
    first = Harness(net, kv=eight)
    expected = eight_bits.answers(first)
    first.close()
    again = Harness(net, kv=eight)
    patient(again)
    assert eight_bits.answers(again) == expected and kept(again).counts["read"] > 0
    again.close()


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_two_ranks_agree_on_what_the_first_has_read_or_have_their_own(
    checkpoint: Callable[..., Path], tmp_path: Path, tier: PageTier
) -> None:
    pages = PageTierConfig(host_bytes=1 << 24, ranks=2)
    if tier == "disk":
        pages = PageTierConfig(str(tmp_path), 1 << 30, MODEL, ranks=2)
    rank_group = ThreadRankGroup(checkpoint("qwen3_vl"), 2, "weights")
    engine = Harness(rank_group.nets[0], rank_group, kv=KVConfig(pages=pages))
    patient(engine)
    prefix = engine.scheduler.prefix
    assert prefix is not None
    expected = eight_bits.answers(engine)
    prefix.evict(prefix.evictable)
    engine.run([])
    assert eight_bits.answers(engine) == expected and kept(engine, tier).counts["read"] > 0
    assert isinstance(engine.worker, ThreadWorkers)
    for worker in engine.worker.workers:
        worker.close()


def test_a_preempted_sequence_comes_back_from_disk(model: Model, tmp_path: Path) -> None:
    """All at once, in a pool for about two of them."""
    longest = max(len(model.request(Harness(model.net), name).tokens) for name in CASES)
    engine = open_engine(model, tmp_path, page_size=4, kv_pages=2 * (longest + 40) // 4)
    for _ in range(2):
        run(engine, model)
    assert engine.scheduler.counts.preemptions > 0
    assert kept(engine).counts["read"] > 0
    engine.close()
