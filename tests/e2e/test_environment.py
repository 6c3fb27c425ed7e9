"""Keys that come by the environment are in no process's environment once they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from saccade import LLM
from saccade_bench.fixtures.server import routing, serving
from tests.helpers.processes import children_of

pytestmark = pytest.mark.slow  # of a server alone: tests/e2e/test_processes.py

SECRETS = {"SACCADE_API_KEY": "open-sesame-1", "SACCADE_ENCODER_KEY": "open-sesame-2"}
OF_OTHERS = {"HF_TOKEN": "open-sesame-3", "AWS_SECRET_ACCESS_KEY": "open-sesame-4"}


def environment_of(process: psutil.Process) -> bytes:
    found = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"PATH=" in found
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc of image workers is root's")
def test_no_process_of_a_server_has_a_key_in_its_environment(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have put there for their own programs: none but the front end has it."""
    for name, value in (SECRETS | OF_OTHERS).items():
        monkeypatch.setenv(name, value)
    with serving(checkpoint("qwen3_vl"), tmp_path) as server:
        front = psutil.Process(server.process.pid)
        # engine, worker, and of images two fork servers, supervisors and workers
        children = children_of(front, 7)
        for process in (front, *children):
            found = environment_of(process)
            kept = SECRETS if process is front else SECRETS | OF_OTHERS
            assert not [value for value in kept.values() if value.encode() in found], process
        url = f"{server.url}/v1/models"
        assert httpx.get(url).status_code == 401
        key = {"Authorization": f"Bearer {SECRETS['SACCADE_API_KEY']}"}
        assert httpx.get(url, headers=key).is_success
        with routing([server], tmp_path) as router:
            found = environment_of(psutil.Process(router.process.pid))
            assert not [value for value in SECRETS.values() if value.encode() in found]
            assert httpx.get(f"{router.url}/v1/models", headers=key).is_success


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc of image workers is root's")
def test_no_process_that_llm_starts_has_a_key_in_its_environment(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own process keeps what is the caller's: `LLM` reads no key there."""
    for name, value in (SECRETS | OF_OTHERS).items():
        monkeypatch.setenv(name, value)
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with LLM(checkpoint("qwen3_vl")):
        for process in children_of(psutil.Process(), 7, before):
            found = environment_of(process)
            kept = (SECRETS | OF_OTHERS).values()
            assert not [value for value in kept if value.encode() in found], process
    assert os.environ["SACCADE_API_KEY"] == SECRETS["SACCADE_API_KEY"]
