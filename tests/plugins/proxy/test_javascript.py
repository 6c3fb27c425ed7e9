"""`examples/clients/send_once.mjs` in Node.js: a fetch that sends bytes once."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.core.options import ServerOptions
from tests.helpers.images import data_url, png
from tests.helpers.served import Served, serving

FILE = Path(__file__).parents[3] / "examples" / "clients" / "send_once.mjs"
NODE = shutil.which("node")
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(NODE is None, reason="needs Node.js (node)"),
]
ASKING = """
import { sendOnce } from "%s";
import { readFileSync } from "node:fs";
const { address, bodies } = JSON.parse(readFileSync(0));
const once = sendOnce();
const answers = [];
for (const body of bodies) {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body };
  const answer = await once(`${address}/v1/chat/completions`, init);
  answers.push([answer.status, await answer.text()]);
}
const listed = await once(`${address}/v1/models`);
console.log(JSON.stringify({ answers, savings: once.savings, listed: listed.status }));
"""


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(ServerOptions(port=0, served_model_name=("demo",))) as served:
        yield served


def ask(address: str, bodies: list[str]) -> Any:
    assert NODE is not None
    told = json.dumps({"address": address, "bodies": bodies})
    command = [NODE, "--input-type=module", "--eval", ASKING % FILE.as_uri()]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def body(*images: bytes, **more: Any) -> str:
    urls = (data_url(each) for each in images)
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    words = {"type": "text", "text": 'é "quoted" \u2028 😀'}
    return json.dumps({"messages": [{"role": "user", "content": [*parts, words]}], **more})


def test_a_history_goes_once(served: Served) -> None:
    # The lengths modulo three are those of base64's three endings.
    images = [png("red", (64 + i, 64)) + bytes(3000 + i) for i in range(6)]
    told = ask(served.address, [body(*images[: i + 1]) for i in range(6)])
    assert [status for status, _ in told["answers"]] == [200] * 6
    assert told["listed"] == 200
    assert (told["savings"]["sent"], told["savings"]["named"]) == (6, 15)
    nbytes = [len(each) for each in images]
    named = sum(sum(nbytes[:i]) for i in range(6))
    assert served.front.metrics.value("saccade_referenced_bytes_total") == named
    assert told["savings"]["bytesOut"] < 1.5 * sum(nbytes)


def test_what_the_server_forgets_goes_again() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",), max_inflight_mb=1)
    images = [png("red", (64 + i, 64)) + bytes(150_000) for i in range(2)]
    bodies = [body(images[0]), body(images[1]), body(images[0]), body(*images)]
    with serving(options) as served:  # it keeps 256 KiB
        told = ask(served.address, bodies)
    assert [status for status, _ in told["answers"]] == [200] * 4
    assert told["savings"]["sent"] == 4


def test_refusals_are_the_servers(served: Served) -> None:
    told = ask(served.address, [body(random.Random(1).randbytes(5000))] * 2 + ["{"])
    assert [status for status, _ in told["answers"]] == [400] * 3
    assert all("invalid_image" in text for _, text in told["answers"][:2])
