"""A machine, or a cgroup, that is short of memory: caches give way in order, what is in use stays,
and answers are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.core.metrics import Metrics
from saccade.core.plan import FreeMemory, Plan
from saccade.core.types import Request
from saccade.engine.memory_watch import BEATS, RELEASED_PART, MemoryWatch
from saccade.ipc.memory import MACHINE, MachineMemory, MemoryUsage
from saccade.ipc.messages import Output, PixelsReady, Stop, Submit, ToEngine, ToFront
from saccade.runtime.memory import return_free
from saccade.runtime.worker import Worker
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, Outcome, run_engine, set_threads
from tests.fixtures.tiny import picture

MIB = 1 << 20
PAGE = 16
"""Tokens."""
ALMOST = 78643 / 1024
"""MiB of 1 GiB that are enough but for 204 bytes. Below 51 memory is short."""


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def set_left(root: Path, left: float, waits: float = 0.0) -> None:
    """Write Linux's files of a machine of 1 GiB. left: MiB."""
    available = f"MemAvailable: {int(left * 1024)} kB"
    write(root, "proc/meminfo", f"MemTotal: 1048576 kB\n{available}\nHugePages_Total: 0\n")
    write(root, "proc/pressure/memory", f"some avg10={waits} avg60=0 total=1\nfull avg10=99 x\n")


# ---- what is left


def test_the_room_is_that_of_the_machine_and_of_every_cgroup_with_a_limit(tmp_path: Path) -> None:
    set_left(tmp_path, 600, 12.5)
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/x\n0::/pod/ours\n")
    pod, ours = "sys/fs/cgroup/pod", "sys/fs/cgroup/pod/ours"
    write(tmp_path, f"{ours}/memory.max", "max\n")
    write(tmp_path, f"{ours}/memory.high", f"{100 * MIB}\n")
    write(tmp_path, f"{ours}/memory.current", f"{90 * MIB}\n")
    stat = f"anon 5\ninactive_file {20 * MIB}\nactive_file {MIB}\nslab_reclaimable {MIB}\n"
    write(tmp_path, f"{ours}/memory.stat", stat)
    write(tmp_path, f"{ours}/memory.pressure", "some avg10=3.00 avg60=0.00\n")
    write(tmp_path, f"{pod}/memory.max", f"{50 * MIB}\n")
    write(tmp_path, f"{pod}/memory.current", f"{70 * MIB}\n")
    machine, group, above = MachineMemory(tmp_path).read()
    assert machine == MemoryUsage(MACHINE, 1024 * MIB, 600 * MIB, 12.5)
    assert group == MemoryUsage(f"cgroup {tmp_path / ours}", 100 * MIB, 32 * MIB, 3.0)
    assert above == MemoryUsage(f"cgroup {tmp_path / pod}", 50 * MIB, 0)


@pytest.mark.parametrize("name", ["0::/\n", "0::/../other\n", "0::/gone\n", "1:memory:/v1\n", ""])
def test_a_container_has_its_limit_at_the_top(tmp_path: Path, name: str) -> None:
    write(tmp_path, "proc/self/cgroup", name)
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{MIB}")
    write(tmp_path, "sys/fs/cgroup/memory.current", "4096")
    assert [room.left for room in MachineMemory(tmp_path).read()] == [MIB - 4096]


def test_files_that_are_missing_or_strange_are_left_out(tmp_path: Path) -> None:
    assert MachineMemory(tmp_path).read() == []
    write(tmp_path, "proc/meminfo", "MemTotal:\nMemAvailable: much kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "4096")
    write(tmp_path, "sys/fs/cgroup/memory.current", "none")
    assert MachineMemory(tmp_path).read() == []
    assert MachineMemory().read(), "this machine is known"


# ---- what is given back


class Front:
    """Answers what is asked for, and stops the engine when both requests have ended."""

    over = False

    def __init__(self, harness: Harness, inbox: list[ToEngine]) -> None:
        self.harness = harness
        self.inbox = inbox
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ended = 0

    def take_messages(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def idle(self) -> None:
        raise AssertionError("the engine waits for what cannot come")

    def send(self, news: ToFront) -> None:
        if not isinstance(news, Output):
            return
        for key, slot in news.want:
            self.harness.arena.view(slot)[:] = self.harness.pixels[key]
            self.inbox.append(PixelsReady(key))
        for delta in news.deltas:
            self.tokens[delta.id] += delta.tokens
            self.ended += delta.finish is not None
        if self.ended == 2:
            self.inbox.append(Stop(10.0))


class Served:
    """Real scheduler and worker, on a machine whose memory the test sets."""

    def __init__(self, checkpoint: Callable[..., Path], root: Path, page_bytes: int = 1) -> None:
        set_threads()
        set_left(root, 600)
        self.root = root
        self.harness = Harness(load(checkpoint("qwen3_vl")))
        self.metrics = Metrics()
        machine, harness = MachineMemory(root), self.harness
        scheduler, arena = harness.scheduler, harness.arena
        self.watch = MemoryWatch(machine, scheduler, arena, page_bytes, self.metrics)
        self.images = [
            harness.image(picture(64, 96, seed=seed), f"picture {seed}") for seed in range(3)
        ]

    def request(self, number: int) -> Request:
        token = self.harness.net.spec.image_token_id  # type: ignore[attr-defined]
        tokens = [1, token, *range(2, 40)]
        return self.harness.request("a", tokens, [self.images[number]], max_tokens=12)

    def ask(self, number: int, between: Callable[[Plan], None] | None = None) -> Outcome:
        return self.harness.run([self.request(number)], between)["a"]

    def look(self, left: float, times: int = 1) -> None:
        """Have the watch look at a machine with so many MiB left."""
        set_left(self.root, left)
        for _ in range(times * BEATS):
            self.watch.tick()

    def carry_out(self) -> None:
        """Have the worker do what is to be done beside requests."""
        self.harness.run([])

    @property
    def kept(self) -> tuple[int, int, int]:
        """Images whose pixels and embeddings are kept, and cached pages."""
        scheduler = self.harness.scheduler
        assert scheduler.prefix is not None
        pixels = sum(image.key in scheduler.image_scheduler.slots for image in self.images)
        return pixels, len(scheduler.embeddings.device), scheduler.prefix.pages

    def given(self, what: str) -> float:
        return self.metrics.value(RELEASED_PART, what=what)


@pytest.fixture
def served(checkpoint: Callable[..., Path], tmp_path: Path) -> Served:
    return Served(checkpoint, tmp_path)


def test_caches_give_way_in_order_and_only_as_much_as_is_missing(served: Served) -> None:
    answers = [served.ask(number) for number in range(3)]
    pixels, embeddings, pages = served.kept
    assert (pixels, embeddings) == (3, 3) and pages > 3
    served.look(60)
    served.look(52)
    assert served.kept == (3, 3, pages), "enough is left"
    served.look(40)
    assert served.kept == (3, 3, pages), "what holds nothing goes first"
    served.look(ALMOST)
    assert served.kept[0] == 2 and served.kept[1:] == (3, pages), "the pixels used longest ago"
    assert served.images[0].key not in served.harness.scheduler.image_scheduler.slots
    assert served.given("pixels") == 20480, "in whole pages of the system"
    for _ in range(2):
        served.look(ALMOST)
    assert served.kept == (0, 3, pages)
    served.look(ALMOST)
    assert served.kept == (0, 2, pages)
    served.look(ALMOST, times=2)
    assert served.kept == (0, 0, pages)
    served.look(ALMOST)
    assert served.kept == (0, 0, 0), "a page of this test is a byte"
    assert served.given("pixels") == 3 * 20480 and served.given("embeddings") > 0
    served.carry_out()
    assert isinstance(served.harness.worker, Worker)
    assert len(served.harness.worker.images.embeddings) == 0
    served.look(77)
    again = [served.ask(number) for number in range(3)]
    assert [each.tokens for each in again] == [each.tokens for each in answers]
    assert [each.levels for each in again] == [["none"]] * 3, "all is made again"
    served.look(60)
    assert served.kept == (3, 3, pages), "between the marks nothing goes"


def test_a_running_request_keeps_what_it_needs_and_answers_the_same(served: Served) -> None:
    answer = served.ask(0)
    served.harness.scheduler.flush(embeddings=True)
    looks = 0

    def look(plan: Plan) -> None:
        nonlocal looks
        looks += 1
        served.look(1)

    assert served.ask(0, look).tokens == answer.tokens
    assert looks > 12 and served.harness.scheduler.counts.preemptions == 0
    assert len(served.harness.encoded) == 2, "once cold, once again"
    served.harness.scheduler.audit()


def test_the_engine_looks_between_steps_and_its_plans_say_what_is_free(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = served.ask(0)
    monkeypatch.setattr("saccade.engine.engine.HEARTBEAT_SECONDS", 0.0)
    set_left(served.root, 1)
    both = served.request(0), replace(served.request(1), id="b")
    front = Front(served.harness, [Submit(request) for request in both])
    plans = run_engine(served.harness, front, served.watch)
    assert front.tokens["a"] == answer.tokens
    told = [plan for plan in plans if plan.unused is not None]
    assert told and any(plan.rows for plan in told), "requests do not end for it"
    for plan in told:
        assert plan.unused is not None
        free = {page for first, count in plan.unused.pages for page in range(first, first + count)}
        assert 0 not in free and free.isdisjoint(page for row in plan.rows for page in row.pages)


def test_what_a_client_has_pinned_stays(served: Served) -> None:
    for number in range(2):
        served.ask(number)
    scheduler = served.harness.scheduler
    scheduler.embeddings.pin_for_client(served.images[1].key, "client", 60)
    served.look(1, times=3)
    assert served.kept == (0, 1, 0)
    assert scheduler.embeddings.locate(served.images[1].key) == "device"


def test_pages_that_cannot_be_returned_stay(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    served = Served(checkpoint, tmp_path, page_bytes=0)
    served.ask(0)
    pages = served.kept[2]
    served.look(1, times=3)
    assert served.kept == (0, 0, pages)


def test_with_nothing_left_to_give_no_plan_is_made(served: Served) -> None:
    served.ask(0)
    served.look(1, times=2)
    served.carry_out()
    steps = served.harness.scheduler.counts.steps
    served.look(1, times=5)
    assert served.harness.scheduler.plan().empty and served.harness.scheduler.idle
    assert served.harness.scheduler.counts.steps == steps


def test_where_processes_wait_for_memory_more_must_be_left(served: Served) -> None:
    served.ask(0)
    served.look(90, times=2)
    assert served.kept[0] == 1
    set_left(served.root, 90, waits=11.0)
    for _ in range(2 * BEATS):
        served.watch.tick()
    assert served.kept == (0, 0, 0)


def test_a_machine_that_was_full_before_has_lower_marks(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    served = Served(checkpoint, tmp_path)
    set_left(tmp_path, 40)
    scheduler, arena = served.harness.scheduler, served.harness.arena
    served.watch = MemoryWatch(MachineMemory(tmp_path), scheduler, arena, 1, served.metrics)
    served.ask(0)
    served.look(20, times=3)
    assert served.kept[:2] == (1, 1)
    served.look(3, times=3)
    assert served.kept == (0, 0, 0)


def test_free_pages_leave_memory_and_others_keep_their_content() -> None:
    pages, each = 64, 1 << 18
    keys = torch.full((pages * PAGE, each // PAGE // 4), 7.0)
    freed = return_free([keys], pages, FreeMemory(((1, 31), (40, 8))))
    assert freed >= 38 * each, "but for the edges of the system's pages"
    rows = keys.view(pages, -1)
    assert bool((rows[0] == 7.0).all() & (rows[32:40] == 7.0).all() & (rows[48:] == 7.0).all())
    assert bool((rows[2:31] == 0.0).all())
    keys.untyped_storage().resize_(0)
    assert return_free([keys], pages, FreeMemory(((1, 31),))) == 0, "asleep"
