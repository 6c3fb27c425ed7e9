"""What becomes of a real server when one of its processes dies or stops: every request ends or goes
on, `/health` tells, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from saccade.core.arena import Arena
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.types import Request, SamplingParams
from saccade.engine.link import EngineProcess
from saccade.ipc.messages import Abort, MetricValues, Output, Scrape, Submit
from saccade_bench.fixtures.server import Server, serving
from tests.helpers.breadth import broad
from tests.helpers.processes import children_of

pytestmark = pytest.mark.more

ENGINE, WORKER = "saccade.engine.main", "saccade.runtime.process"
OPTIONS = ("--dtype", "float32", "--served-model-name", "tiny")


SECRETS = {"SACCADE_API_KEY": "open-sesame-1", "SACCADE_ENCODER_KEY": "open-sesame-2"}
KEY = SECRETS["SACCADE_API_KEY"]
OF_OTHERS = {"HF_TOKEN": "open-sesame-3", "AWS_SECRET_ACCESS_KEY": "open-sesame-4"}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Has keys in its environment, its own and others'. The last test that asks it ends it."""
    logs = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SECRETS | OF_OTHERS).items():
            patch.setenv(name, value)
        with serving(folder, logs, *OPTIONS, "--metrics-without-key") as server:
            patch.undo()
            yield server


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the server, of its own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def family(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def running(processes: list[psutil.Process], module: str) -> list[psutil.Process]:
    """Those that run a module, by age: workers by rank."""
    return sorted(
        (process for process in processes if module in process.cmdline()),
        key=lambda process: process.pid,
    )


def ask(client: openai.OpenAI, max_tokens: int) -> str | None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "go on"}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def wait_for_health(server: Server, status: int, seconds: float) -> dict[str, str]:
    deadline = time.monotonic() + seconds
    while (health := httpx.get(f"{server.url}/health")).status_code != status:
        assert time.monotonic() < deadline, health.text
        time.sleep(0.1)
    return health.json()


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in region.path for region in process.memory_maps())


# By default the engine's and the front end's death are those of test_picture_path.py, a rank's that
# of parallel/test_workers.py.
@pytest.mark.parametrize(
    ("module", "place", "ranks", "reason"),
    [
        (ENGINE, 0, "1", "the engine process was killed by signal 9"),
        pytest.param(
            *(WORKER, 0, "1", r"the worker \(process \d+\) was killed by signal 9"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(WORKER, 0, "2", r"rank 0 \(process \d+\) was killed by signal 9"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(WORKER, 1, "2", r"rank 1 \(process \d+\) was killed by signal 9"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["engine", "worker", "rank 0", "rank 1"],
)
def test_the_death_of_engine_or_worker_fails_requests_shows_in_health_and_ends_the_server(
    folder: Path, tmp_path: Path, temporary: Path, module: str, place: int, ranks: str, reason: str
) -> None:
    with serving(folder, tmp_path, *OPTIONS, "--tp-size", ranks, status=1) as server:
        client, processes = client_of(server), family(server)
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, client, 3500) for _ in range(4)]
            server.wait_for_metric("saccade_requests_running", 4)
            running(processes, module)[place].kill()
            for request in asking:
                with pytest.raises(openai.InternalServerError) as caught:
                    request.result(timeout=5)
                assert caught.value.status_code == 503
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert re.search(reason, health.json()["reason"])
        assert server.process.wait(15) == 1
        assert not psutil.wait_procs(processes, timeout=5)[1]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("ranks", broad([1, 2], keep=[1]))
def test_the_death_of_the_front_leaves_no_process_and_no_file(
    folder: Path, tmp_path: Path, temporary: Path, ranks: int
) -> None:
    with serving(folder, tmp_path, *OPTIONS, "--tp-size", str(ranks), status=-9) as server:
        processes = family(server)
        assert len(running(processes, WORKER)) == ranks and len(running(processes, ENGINE)) == 1
        server.process.kill()
        server.process.wait()
        assert not psutil.wait_procs(processes, timeout=5)[1]
    assert list(temporary.iterdir()) == []


def test_only_workers_have_loaded_torch(server: Server) -> None:
    processes = family(server)
    assert all(map(has_torch, running(processes, WORKER)))
    assert not any(map(has_torch, running(processes, ENGINE)))
    assert not has_torch(psutil.Process(server.process.pid))


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc of image workers is root's")
def test_no_process_of_a_server_has_a_key_in_its_environment(server: Server) -> None:
    """What others have put there for their own programs: none but the front end has it."""
    front = psutil.Process(server.process.pid)
    # engine, worker, and of images two fork servers, supervisors and workers
    children = children_of(front, 7)
    for process in (front, *children):
        found = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"PATH=" in found
        kept = SECRETS if process is front else SECRETS | OF_OTHERS
        assert not [value for value in kept.values() if value.encode() in found], process
    url = f"{server.url}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).is_success


def test_a_stopped_engine_shows_in_health_and_goes_on_where_it_was(server: Server) -> None:
    client = client_of(server)
    (engine,) = running(family(server), ENGINE)
    before = ask(client, 40)
    with ThreadPoolExecutor(1) as pool:
        engine.send_signal(signal.SIGSTOP)
        asking = pool.submit(ask, client, 40)
        try:
            health = wait_for_health(server, 503, 10.0)
            assert health["status"] == "stalled"
            assert re.search(r"no heartbeat from the engine for \d+ s", health["reason"])
            assert server.metric("saccade_engine_stalled") == 1
            assert not asking.done(), "it waits: the engine may come back"
            time.sleep(3)  # longer than the engine lets its workers be silent
        finally:
            engine.send_signal(signal.SIGCONT)
        assert asking.result(timeout=20) == before
    assert wait_for_health(server, 200, 5.0)["status"] == "ready"
    assert server.metric("saccade_engine_stalled") == 0


def test_a_stop_signal_lets_running_requests_finish_and_leaves_no_process(server: Server) -> None:
    """The last that asks this server."""
    client, processes = client_of(server), family(server)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, client, 1500)
        server.wait_for_metric("saccade_requests_running", 1)
        server.process.terminate()
        assert asking.result(timeout=30)
    assert server.process.wait(30) == 0
    assert not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.slow
def test_a_server_with_a_stopped_engine_ends_when_told(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, *OPTIONS) as server:
        client, processes = client_of(server), family(server)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask, client, 3500)
            server.wait_for_metric("saccade_requests_running", 1)
            running(processes, ENGINE)[0].send_signal(signal.SIGSTOP)
            server.process.terminate()
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                asking.result(timeout=15)  # of a grace of 30
        assert server.process.wait(10) == 0
        assert not psutil.wait_procs(processes, timeout=5)[1]


def test_messages_are_handled_while_a_step_runs(folder: Path) -> None:
    """The worker is stopped in the middle of a step: what is answered meanwhile, the engine answers
    without it.
    """

    async def talk() -> None:
        arena = Arena.create(1 << 24)
        model = ModelOptions(dtype="float32")
        engine = EngineProcess(folder, model, EngineOptions(threads=1), arena)
        await engine.start(lambda _: None)
        worker = psutil.Process(engine.pid).children()[0]

        async def ended() -> dict[str, str]:
            ends: dict[str, str] = {}
            while not ends:
                if isinstance(message := await engine.receive(), Output):
                    ends = {delta.id: delta.finish for delta in message.deltas if delta.finish}
            return ends

        def submit(id: str) -> None:
            sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
            engine.send(Submit(Request(id, (1, 2, 3), (), (), sampling)))

        try:
            submit("long")
            while not isinstance(await engine.receive(), Output):
                pass
            worker.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            while True:  # what was on its way
                try:
                    await asyncio.wait_for(engine.receive(), 0.2)
                except TimeoutError:
                    break
            submit("new")
            engine.send(Abort("new"))
            assert await asyncio.wait_for(ended(), 2) == {"new": "abort"}
            engine.send(Abort("long"))
            assert await asyncio.wait_for(ended(), 2) == {"long": "abort"}
            engine.send(Scrape())
            assert isinstance(await asyncio.wait_for(engine.receive(), 2), MetricValues)
            assert worker.status() == psutil.STATUS_STOPPED, "all this while no step could end"
            worker.send_signal(signal.SIGCONT)
            engine.send(Submit(Request("after", (1, 2, 3), (), (), SamplingParams(max_tokens=3))))
            assert (await asyncio.wait_for(ended(), 10)).keys() == {"after"}
        finally:
            worker.send_signal(signal.SIGCONT)
            await engine.stop(0.0)
        assert not worker.is_running()

    asyncio.run(asyncio.wait_for(talk(), 60))
