"""The example of an agent: an unchanged OpenAI client whose trimmed prompts are made ready."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from saccade_bench.fixtures.server import serving

pytestmark = pytest.mark.more

EXAMPLE = Path(__file__).parents[2] / "examples/agent/screen_agent.py"


def test_an_openai_client_that_keeps_two_screenshots_finds_its_prompts_ready(
    tmp_path: Path,
) -> None:
    """From the second cut on, whose rule the first has shown."""
    pytest.importorskip("openai")
    with serving("demo", tmp_path) as server:
        words = ["--base-url", server.url, "--keep", "2", "--force", "8", "--pause", "1"]
        command = [sys.executable, str(EXAMPLE), *words]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ready = [int(found) for found in re.findall(r"(\d+) of them made ready", told)]
    assert ready and min(ready) > 256, told
    assert "made ready" not in "".join(told.splitlines()[:4])
