"""Child processes: what is said arrives in order and whole, and every death is told, with its
reason, and leaves nothing. Real processes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from saccade.ipc.child import (
    LAST_WORDS_BYTES,
    AsyncChannel,
    Channel,
    Child,
    Codec,
    Disconnected,
)
from tests.core.chatty import Do, Greeting, Order, Said, Say

CODEC: Codec[Order, Said] = Codec(Order, Said)
LARGE = "ä" * 3_000_000
"""Many times what a socket holds."""


Runner = Callable[[Coroutine[None, None, None]], None]
RUNNERS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture(scope="module", autouse=True)
def _used_uvloop() -> None:
    """libuv keeps a pipe of its own from its first loop on."""
    uvloop.run(asyncio.sleep(0))


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def chatty(name: str = "hello") -> Iterator[Child]:
    """A child that has read its boot message. Nothing is left of it afterwards."""
    descriptors = count_descriptors()
    reading, writing = os.pipe()
    child = Child.spawn("tests.core.chatty", Greeting(name, writing), (writing,))
    os.close(writing)
    assert os.read(reading, 100) == name.encode()
    os.close(reading)
    try:
        yield child
    finally:
        child.end_sync()
    assert not psutil.pid_exists(child.pid), "not even a zombie"
    assert count_descriptors() <= descriptors


def test_the_blocking_ends_talk_in_order_whatever_the_size() -> None:
    with chatty() as child:
        channel = Channel(child.socket, CODEC)
        for text in ("a", LARGE, "", "b"):
            channel.send(Say(text))
            assert channel.receive() == Said(text)
        assert not channel.waiting()
        channel.send(Say("c"))
        assert channel.waiting(10.0)


@RUNNERS
def test_an_event_loop_sends_without_waiting_for_the_other_end_to_read(run: Runner) -> None:
    async def talk(child: Child) -> None:
        channel = await AsyncChannel.open(child.socket, CODEC)
        texts = ["a", LARGE, *map(str, range(1000)), LARGE]
        for text in texts:  # the child answers each before it reads the next: none has been read
            channel.send(Say(text))
        assert channel.unsent_bytes > len(LARGE)
        assert [(await channel.receive()).text for _ in texts] == texts
        assert channel.take_messages() == []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.05)
        channel.send(Say("after a receive that was cancelled"))
        assert await channel.receive() == Said("after a receive that was cancelled")
        channel.close()
        assert await child.wait() == 7, "the child sees that its parent has closed the socket"

    with chatty() as child:
        run(talk(child))


@RUNNERS
def test_what_a_child_sent_before_its_death_is_read_and_then_the_death_told(run: Runner) -> None:
    async def talk(child: Child) -> None:
        channel = await AsyncChannel.open(child.socket, CODEC)
        channel.send(Say("last"))
        channel.send(Do("die"))
        assert await asyncio.gather(child.wait(), child.wait()) == [-9, -9]
        assert await channel.receive() == Said("last")
        with pytest.raises(Disconnected):
            await channel.receive()
        channel.send(Say("to nobody"))
        channel.close()

    with chatty() as child:
        run(talk(child))
        assert child.ending == "was killed by signal 9"


def test_a_child_whose_main_thread_hangs_can_say_why_it_ends() -> None:
    with chatty() as child:
        channel = Channel(child.socket, CODEC)
        channel.send(Do("give up while the main thread hangs"))
        assert child.wait_sync(10.0) == 1
        assert child.ending.startswith("failed: it hangsxxx")
        assert len(child.ending) <= len("failed: ") + LAST_WORDS_BYTES
        with pytest.raises(Disconnected):
            channel.receive()


def test_signals_are_left_to_the_front() -> None:
    with chatty() as child:
        channel = Channel(child.socket, CODEC)
        channel.send(Do("count signals"))
        assert channel.receive() == Said("alive")


@pytest.mark.parametrize("patience", [0.0, 0.2])
def test_a_child_that_hangs_is_killed(patience: float) -> None:
    with chatty() as child:
        Channel(child.socket, CODEC).send(Do("hang"))
        asyncio.run(child.end(patience))
        assert child.status == -9 and child.ending == "was killed by signal 9"


@pytest.mark.more
def test_a_child_dies_with_its_parent_however_that_went() -> None:
    program = (
        "import os, signal\n"
        "from saccade.ipc.child import Child\n"
        "from tests.core.chatty import Greeting\n"
        "reading, writing = os.pipe()\n"
        "child = Child.spawn('tests.core.chatty', Greeting('up', writing), (writing,))\n"
        "os.read(reading, 2)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9
    pid = int(done.stdout)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_module_that_does_not_start_has_ended_with_its_status() -> None:
    child = Child.spawn("tests.core.no_such_module", Greeting("x" * 10_000_000, 0))
    assert child.wait_sync(10.0) == 1
    assert child.ending == "exited with status 1"
    child.release()


@pytest.mark.more
def test_a_child_that_is_still_importing_ends_with_its_parent(tmp_path: Path) -> None:
    """What it imports takes seconds, and for ever here."""
    (tmp_path / "slow_to_import.py").write_text("import time\nprint('here')\ntime.sleep(600)\n")
    program = (
        "from saccade.ipc.child import Child\n"
        "child = Child.spawn('slow_to_import', None)\n"
        "print(child.pid, flush=True)\n"
        "child.wait_sync()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "here\n"
        parent.kill()
        gone, alive = psutil.wait_procs([child], timeout=20)
        for each in alive:
            each.kill()
        assert gone and not alive
