"""Keys that come by the environment are in no process's environment once they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from saccade_bench.fixtures.server import serving

SECRETS = {"SACCADE_API_KEY": "open-sesame-1", "SACCADE_ENCODER_KEY": "open-sesame-2"}
OF_OTHERS = {"HF_TOKEN": "open-sesame-3", "AWS_SECRET_ACCESS_KEY": "open-sesame-4"}


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc of image workers is root's")
def test_no_process_of_a_server_has_a_key_in_its_environment(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have put there for their own programs: none but the front has it."""
    for name, value in (SECRETS | OF_OTHERS).items():
        monkeypatch.setenv(name, value)
    with serving(checkpoint("qwen3_vl"), tmp_path) as server:
        front = psutil.Process(server.process.pid)
        children = front.children(recursive=True)
        assert len(children) >= 7, "engine, worker, and of images two stocks, nurseries and workers"
        for process in (front, *children):
            found = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert b"PATH=" in found
            kept = SECRETS if process is front else SECRETS | OF_OTHERS
            assert not [value for value in kept.values() if value.encode() in found], process
        url = f"{server.url}/v1/models"
        assert httpx.get(url).status_code == 401
        key = {"Authorization": f"Bearer {SECRETS['SACCADE_API_KEY']}"}
        assert httpx.get(url, headers=key).is_success
