"""The server for OpenVINO GenAI, without OpenVINO's environment, which tests do not install."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("openvino_genai") is not None, reason="OpenVINO GenAI is installed")
def test_a_missing_environment_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "saccade_bench.peers.openvino_server", "folder"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "No module named 'openvino'" in run.stderr and "openvino-genai" in run.stderr
    assert "Traceback" not in run.stderr
