"""Several servers on a real Ray Serve: to clients the same as one server or `saccade route`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import picture
from tests.e2e.server import Server
from tests.e2e.test_route import (
    SOON,
    Fleet,
    ask,
    chat,
    chats,
    outcome,
    test_a_command_to_forget_reaches_every_server,
    test_a_response_goes_on_where_it_is_kept,
    test_a_stream_comes_as_it_is_made,
    test_a_stream_is_the_answer_piece_by_piece,
    test_an_uploaded_file_is_there_whoever_is_asked,
    test_errors_are_the_servers_own,
    test_health_and_metrics_are_the_routers_own,
    test_the_anthropic_sdk_is_answered,
)
from tests.e2e.test_serve import text_part, user

pytest.importorskip("ray.serve")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # Ray's own
    pytest.mark.filterwarnings("ignore"),
]

SAME = (
    test_a_command_to_forget_reaches_every_server,
    test_a_response_goes_on_where_it_is_kept,
    test_a_stream_comes_as_it_is_made,
    test_a_stream_is_the_answer_piece_by_piece,
    test_an_uploaded_file_is_there_whoever_is_asked,
    test_errors_are_the_servers_own,
    test_health_and_metrics_are_the_routers_own,
    test_the_anthropic_sdk_is_answered,
)
"""Tests of the router that are asked of Ray's ingress too: they run here, with this `fleet`."""
SERVE = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192"),
    *("--media-workers", "1", "--threads", "1"),
)
RUN = "from ray.serve.scripts import cli; cli()"
START_SECONDS = 240
CHATS = 24


@dataclass(frozen=True)
class RayFleet(Fleet):
    """`started`: seconds until all servers were ready; `bytes`: memory that Ray's own
    processes, and no servers, share with nobody.
    """

    started: float
    bytes: int

    def owners(self) -> dict[str, tuple[psutil.Process, psutil.Process]]:
        """Of each server, by its URL: the replica that owns it, and its process."""
        found = {}
        for each in psutil.Process(self.router.process.pid).children(recursive=True):
            with suppress(psutil.Error, ValueError):  # one that has yet to listen
                if each.cmdline()[1:4] == ["-m", "saccade", "serve"]:
                    (port,) = (
                        at.laddr.port for at in each.net_connections("tcp") if at.status == "LISTEN"
                    )
                    owner = each.parent()
                    assert owner is not None
                    found[str(port)] = (owner, each)
        return {each.url: found[each.url.rpartition(":")[2]] for each in self.now()}

    def now(self) -> list[Server]:
        """The servers that are ready."""
        told = httpx.get(f"{self.router.url}/health", timeout=30).json()["workers"]
        urls = [each["url"] for each in told if each["status"] == "ready"]
        return [Server(url, self.router.process, self.router.log) for url in urls]

    def wait_for(self, count: int, but: Sequence[str] = ()) -> list[Server]:
        """Until there are so many servers, none of them at these URLs."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert time.monotonic() < deadline, self.router.log.read_text()[-4000:]
            servers = [each for each in self.now() if each.url not in but]
            if len(servers) == count:
                return servers
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


QUICK = ("upscale_delay_s: 1", "downscale_delay_s: 2", "look_back_period_s: 2")
"""Ray's own are made for hours."""


def write_config(folder: Path, logs: Path, port: int, *options: str) -> Path:
    """By the command that users have."""
    path = logs / "deploy.yaml"
    few = ("--gpus", "0", "--cpus", "0.25", "--port", str(port), "--drain", "20")
    command = [sys.executable, "-m", "saccade", "deploy", "ray", str(folder), *few, *options]
    command += ["--output", str(path), "--", *SERVE, "--files-dir", str(logs / "files")]
    subprocess.run(command, check=True)
    return path


@contextmanager
def deployed(
    folder: Path, logs: Path, replicas: int, *options: str, cluster: str = ""
) -> Iterator[RayFleet]:
    """`serve run` of the file, until as many servers are ready. Nothing is left of it. `cluster`:
    the address of one that runs, and has a replica on each node; "": one node, started here.
    """
    port = free_port()
    path = write_config(folder, logs, port, "--replicas", str(replicas), *options)
    scale = "autoscaling_config:\n"
    quick = "".join(f"      {line}\n" for line in (*QUICK, "metrics_interval_s: 1"))
    told = path.read_text().replace(scale, scale + quick)
    if cluster:  # of nodes that share an address, on which one proxy can listen
        told = told.replace('"EveryNode"', '"HeadOnly"')
        told = told.replace(
            '- name: "engine"\n', '- name: "engine"\n    max_replicas_per_node: 1\n'
        )
    path.write_text(told)
    log = logs / "ray.log"
    short = tempfile.mkdtemp(prefix="ray")  # sockets lie in it, whose names may not be long
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "RAY_DEDUP_LOGS": "0"}
    quiet |= {"RAY_ADDRESS": cluster} if cluster else {}
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, "run", str(path)],
            stdout=out,
            stderr=out,
            env={**os.environ, **quiet},
            start_new_session=True,
        )
    router = Server(f"http://127.0.0.1:{port}", process, log)
    family = [psutil.Process(process.pid)]
    try:
        while True:
            assert process.poll() is None and time.monotonic() - began < START_SECONDS, (
                log.read_text()[-4000:]
            )
            with suppress(httpx.TransportError, ValueError, KeyError):
                told = httpx.get(f"{router.url}/health", timeout=30).json()
                ready = [each for each in told["workers"] if each["status"] == "ready"]
                if len(ready) == replicas:
                    break
            time.sleep(0.2)
        started = time.monotonic() - began
        family += family[0].children(recursive=True)
        theirs = [each for each in family if "saccade" not in " ".join(each.cmdline()[1:3])]
        resident = sum(each.memory_full_info().uss for each in theirs)
        workers = [Server(each["url"], process, log) for each in ready]
        yield RayFleet(workers, router, started, resident)
        family += [each for each in family[0].children(recursive=True) if each not in family]
        process.send_signal(signal.SIGINT)
        process.wait(90)
        assert not psutil.wait_procs(family, timeout=30)[1], "something of it is left"
    finally:
        for each in family:
            with suppress(psutil.Error):
                each.kill()
        process.wait()
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with deployed(folder, tmp_path_factory.mktemp("r"), 2) as fleet:
        print(f"\nready after {fleet.started:.1f} s; Ray's own processes: {fleet.bytes >> 20} MiB")
        yield fleet


def test_the_printed_file_is_what_ray_reads(folder: Path, tmp_path: Path) -> None:
    """By Ray's own schema, with and without autoscaling."""
    import yaml
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    for options in ((), ("--max-replicas", "4", "--target-requests", "8")):
        path = write_config(folder, tmp_path, 8000, "--replicas", "2", *options)
        read = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
        (application,) = read.applications
        engine, ingress = application.deployments
        assert application.import_path == "saccade.route.ray:app"
        assert (engine.name, ingress.name) == ("engine", "ingress")
        if options:
            scale = AutoscalingConfig.model_validate(engine.autoscaling_config)
            assert (scale.min_replicas, scale.max_replicas) == (2, 4)
            assert scale.get_target_ongoing_requests() == 8
            assert scale.policy.get_policy().__name__ == "by_queue"
        else:
            assert engine.num_replicas == 2


def test_every_image_of_every_chat_is_encoded_once_in_the_whole_fleet(fleet: RayFleet) -> None:
    before = fleet.encodes
    chats(fleet.router.url, [picture(64, 64, seed=100 + number) for number in range(CHATS)])
    encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
    print(f"\n{encoded} encodes of {CHATS} images")
    assert sum(encoded) == CHATS
    assert min(encoded) > 0, "both have something to do"


def test_a_large_body_goes_through(fleet: RayFleet) -> None:
    filler = {"user": "x" * 3_000_000}
    assert ask(fleet.client(), [user(text_part("what?"))], extra_body=filler).choices


@pytest.mark.parametrize("whom", ["server", "replica"])
def test_what_is_killed_under_load_takes_nothing_along(fleet: RayFleet, whom: str) -> None:
    """24 chats go on in rounds while a replica, or the server that it owns, is killed: every round
    ends, soon, in an answer or in a typed error; the chat goes on elsewhere, and Ray starts another
    replica.
    """
    client = fleet.client()
    servers = {each.url: each for each in fleet.wait_for(2)}
    doomed, (owner, process) = next(iter(fleet.owners().items()))
    (left,) = (each for url, each in servers.items() if url != doomed)
    family = [owner, process, *process.children(recursive=True)]
    before = left.metric("saccade_images_encoded_total")
    deaths: list[float] = []
    seed = 4000 + 1000 * (whom == "server")
    images = [picture(64, 64, seed=seed + number) for number in range(CHATS)]

    def talk(number: int) -> list[str]:
        ends = [outcome(client, images[number], number % 2 == 0, deaths) for _ in range(4)]
        chat(client, images[number], rounds=2)
        return ends

    with ThreadPoolExecutor(CHATS) as pool:
        talking = [pool.submit(talk, number) for number in range(CHATS)]
        deadline = time.monotonic() + 60
        while servers[doomed].metric("saccade_requests_running") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        deaths.append(time.monotonic())
        (process if whom == "server" else owner).kill()
        gone = psutil.wait_procs(family, timeout=SOON)[1]
        ends = [end for each in talking for end in each.result(timeout=600)]
    print(f"\n{ends.count('answer')} answers, {ends.count('error')} typed errors")
    assert not gone, "a replica and its server end together"
    assert ends.count("answer") >= 4 * CHATS - CHATS
    assert left.metric("saccade_images_encoded_total") - before <= CHATS
    fleet.wait_for(2, but=[doomed])
    print(f"another replica after {time.monotonic() - deaths[0]:.1f} s")
    messages: Any = chat(client, images[0], rounds=1)
    assert ask(client, messages).choices


def test_images_are_encoded_by_a_deployment_of_encoders(folder: Path, tmp_path: Path) -> None:
    """24 chats, at random routing: each image once, by the encoder, which Ray then has to start
    again somewhere else; nobody else encodes before and after.
    """
    with deployed(folder, tmp_path, 2, "--encoders", "1", "--affinity", "none") as fleet:
        encoder = known_encoder(fleet)
        images = [picture(64, 64, seed=7000 + number) for number in range(CHATS)]
        chats(fleet.router.url, images)
        sent = sum(encoder.metric(SENT, source=source) for source in ("tower", "cache"))
        print(f"\nencoded: {encoder.metric(ENCODED)} by the encoder, {fleet.encodes} by others;")
        print(f"{sent:.0f} embeddings sent")
        assert encoder.metric(ENCODED) == CHATS and sum(fleet.encodes) == 0
        assert CHATS < sent <= 2 * CHATS, "to each server once"

        (process,) = encoders_of(fleet)
        process.kill()
        psutil.wait_procs([process], timeout=SOON)
        other = known_encoder(fleet, but=encoder.url)
        chats(fleet.router.url, [picture(64, 64, seed=8000 + number) for number in range(CHATS)])
        assert other.metric(ENCODED) == CHATS and sum(fleet.encodes) == 0


SENT, ENCODED = "saccade_embeddings_sent_total", "saccade_images_encoded_total"


def encoders_of(fleet: RayFleet) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(fleet.router.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = each.cmdline()
            if words[1:4] == ["-m", "saccade", "serve"] and "encode" in words:
                found.append(each)
    return found


def known_encoder(fleet: RayFleet, but: str = "") -> Server:
    """The encoder, once every server has been told of it."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert time.monotonic() < deadline, fleet.router.log.read_text()[-4000:]
        owners = [psutil.Process(owner.pid) for owner, _ in fleet.owners().values()]
        lists = [listed(each) for each in owners]
        if all(lists) and len(set(lists)) == 1 and lists[0] != but:
            time.sleep(1.5)  # the servers read it once a second
            return Server(lists[0], fleet.router.process, fleet.router.log)
        time.sleep(0.2)


def listed(owner: psutil.Process) -> str:
    """What its server is told of encoders."""
    for each in owner.children(recursive=True):
        with suppress(psutil.Error, FileNotFoundError, ValueError):
            words = each.cmdline()
            return Path(words[words.index("--encoders-file") + 1]).read_text().strip()
    return ""


def test_replicas_on_two_nodes_are_one_fleet(folder: Path, tmp_path: Path) -> None:
    """Two of Ray's nodes on this machine, a replica on each; one node dies, with its server, and
    perhaps with the ingress, which Ray then starts on the other.
    """
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        other = nodes.add_node(num_cpus=2)
        with deployed(folder, tmp_path, 2, cluster=nodes.address) as fleet:
            before = fleet.encodes
            chats(
                fleet.router.url, [picture(64, 64, seed=9000 + number) for number in range(CHATS)]
            )
            encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
            print(f"\n{encoded} encodes of {CHATS} images, on two nodes")
            assert sum(encoded) == CHATS and min(encoded) > 0
            both = [each.url for each in fleet.workers]
            nodes.remove_node(other, allow_graceful=False)
            left: list[Server] = []
            deadline = time.monotonic() + START_SECONDS
            while len(left) != 1:
                assert time.monotonic() < deadline, fleet.router.log.read_text()[-4000:]
                time.sleep(0.5)
                with suppress(httpx.TransportError, ValueError):
                    left = fleet.now()
            chats(fleet.router.url, [picture(64, 64, seed=9500)])
            assert left[0].url in both, "the other node's goes on"
    finally:
        nodes.shutdown()
    for url in both:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")


def test_servers_come_with_requests_and_go_when_theirs_have_ended(
    folder: Path, tmp_path: Path
) -> None:
    """A second server is started for a queue, and ended after it; what the server that goes was
    answering is answered whole.
    """
    options = ("--max-replicas", "2", "--target-requests", "8")
    with deployed(folder, tmp_path, 1, *options) as fleet, ThreadPoolExecutor(20) as pool:
        client = fleet.client()

        def stream(number: int, tokens: int) -> int:
            settings: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "timeout": 300}
            messages = [user(text_part(f"{number} go on"))]
            pieces = ask(client, messages, max_tokens=tokens, stream=True, **settings)
            return [each.choices[0].finish_reason for each in pieces if each.choices].count(
                "length"
            )

        began = time.monotonic()
        queue = [pool.submit(stream, number, 1000) for number in range(20)]
        servers = fleet.wait_for(2)
        print(f"\na second server after {time.monotonic() - began:.1f} s")
        assert all(each.result(timeout=300) for each in queue)
        last = [pool.submit(stream, number, 2000) for number in range(50, 57)]  # less than a queue
        deadline = time.monotonic() + 60
        while not all(each.metric("saccade_requests_running") for each in servers):
            assert time.monotonic() < deadline and not all(each.done() for each in last)
            time.sleep(0.1)
        (left,) = fleet.wait_for(1)
        assert all(each.result(timeout=300) for each in last)
        assert left.url in {each.url for each in servers}
