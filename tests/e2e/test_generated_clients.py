"""Clients that generators make of `/openapi.json` ask the demo model about an image.

Needs openapi-python-client (PyPI), or openapi-typescript with openapi-fetch and typescript 5 (npm,
its `node_modules/.bin` on the PATH).
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from saccade.demo.run import QUESTIONS
from saccade_bench.fixtures.server import serving

pytestmark = pytest.mark.slow

PYTHON = """
import base64, json, sys
sys.path.insert(0, "client")
from saccade_client import Client
from saccade_client.api.chat import post_chat_completions as ask
from saccade_client.models import ChatCompletionRequest
url = "data:image/png;base64," + base64.b64encode(open("image.png", "rb").read()).decode()
parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": sys.argv[2]}]
body = ChatCompletionRequest.from_dict({"messages": [{"role": "user", "content": parts}]})
told = ask.sync(client=Client(base_url=sys.argv[1]), body=body)
print(json.dumps(told.to_dict()))
"""
TYPESCRIPT = """
import createClient from "openapi-fetch";
import type { paths } from "./schema";
declare const process: { argv: string[] };
const client = createClient<paths>({ baseUrl: process.argv[2] });
const parts = [
  { type: "image_url" as const, image_url: { url: process.argv[4] } },
  { type: "text" as const, text: process.argv[3] },
];
const { data } = await client.POST("/v1/chat/completions", {
  body: { messages: [{ role: "user", content: parts }] } as never,
});
console.log(JSON.stringify(data));
"""


def found(tool: str) -> Path:
    where = shutil.which(tool)
    if where is None:
        pytest.skip(f"{tool} is not on the PATH: install it to run its client")
    return Path(where)


def run(folder: Path, *words: object) -> str:
    done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(tool: str, folder: Path) -> None:
    where, exchange = found(tool), QUESTIONS[0]
    shutil.copy(exchange.images[0], folder / "image.png")
    with serving("demo", folder) as server:
        (folder / "openapi.json").write_bytes(httpx.get(f"{server.url}/openapi.json").content)
        client = python_client if tool == "openapi-python-client" else typescript_client
        told = json.loads(client(where, folder, server.url, exchange.question).splitlines()[-1])
    assert told["choices"][0]["message"]["content"] == exchange.answer


def python_client(tool: Path, folder: Path, url: str, question: str) -> str:
    words = ("generate", "--path", "openapi.json", "--output-path", "client")
    said = run(folder, tool, *words)
    assert "Unable" not in said and "WARNING" not in said, said
    (folder / "ask.py").write_text(PYTHON)
    beside = tool.parent / "python"
    return run(folder, beside if beside.exists() else sys.executable, "ask.py", url, question)


def typescript_client(tool: Path, folder: Path, url: str, question: str) -> str:
    (folder / "node_modules").symlink_to(tool.parent.parent)
    (folder / "package.json").write_text('{"type": "module"}')
    run(folder, tool, "openapi.json", "-o", "schema.ts")
    (folder / "ask.ts").write_text(TYPESCRIPT)
    strict = ("--strict", "--target", "es2022", "--module", "esnext", "--lib", "es2022,dom")
    run(folder, tool.parent / "tsc", *strict, "--moduleResolution", "bundler", "ask.ts")
    image = "data:image/png;base64," + _base64(folder / "image.png")
    return run(folder, found("node"), "ask.js", url, question, image)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("tool", ["openapi-python-client", "openapi-typescript"])
def test_a_generated_client_asks_about_an_image(tool: str, tmp_path: Path) -> None:
    ask(tool, tmp_path)
