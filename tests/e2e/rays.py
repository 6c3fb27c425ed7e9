"""Several servers on a real Ray Serve, by the file that `saccade deploy ray` prints.

Owns how they are started, and how nothing is left of them. Knows nothing of what is asked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from saccade.ipc.own_server import free_port
from saccade_bench.fixtures.server import Server
from tests.e2e.fleets import Fleet

SERVE = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-total-tokens", "8192"),
    *("--media-workers", "1", "--threads", "1"),
)
RUN = "from ray.serve.scripts import cli; cli()"
START_SECONDS = 240


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
                if each.cmdline()[3:5] == ["saccade", "serve"]:
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


QUICK = ("upscale_delay_s: 1", "downscale_delay_s: 2", "look_back_period_s: 2")
"""Ray's own are made for hours."""


def write_config(model: str | Path, logs: Path, port: int, *options: str) -> Path:
    """By the command that users have."""
    path = logs / "deploy.yaml"
    few = ("--gpus", "0", "--cpus", "0.25", "--port", str(port), "--drain", "20")
    command = [sys.executable, "-m", "saccade", "deploy", "ray", str(model), *few, *options]
    command += ["--output", str(path), "--", *SERVE, "--files-dir", str(logs / "files")]
    subprocess.run(command, check=True)
    return path


@contextmanager
def deployed(
    model: str | Path, logs: Path, replicas: int, *options: str, cluster: str = ""
) -> Iterator[RayFleet]:
    """`serve run` of the file, until as many servers are ready. Nothing is left of it. `cluster`:
    the address of one that runs, and has a replica on each node; "": one node, started here.
    """
    port = free_port()
    path = write_config(model, logs, port, "--replicas", str(replicas), *options)
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
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of sockets may not be long
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
