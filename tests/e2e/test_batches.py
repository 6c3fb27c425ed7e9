"""A batch outlives its server: killed in the middle, it goes on in the next one with the folder."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest

from saccade_bench.eval.ocr import draw_reading
from saccade_bench.fixtures.server import Server, serving

LINES, IMAGES = 60, 6


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.slow
def test_a_killed_server_loses_no_line_and_encodes_each_image_once(tmp_path: Path) -> None:
    options = ("--files-dir", str(tmp_path / "files"))
    images = [draw_reading(seed, "number") for seed in range(IMAGES)]
    with serving("demo", tmp_path, *options, status=-9) as server:
        client = client_of(server)
        ids = [
            client.files.create(file=("n.png", each.encoded), purpose="vision").id
            for each in images
        ]
        lines = "".join(line(number, ids[number % IMAGES]) + "\n" for number in range(LINES))
        file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = 0
        while done < LINES // 3:
            counts = client.batches.retrieve(batch.id).request_counts
            done = counts.completed if counts else 0
        assert server.metric("saccade_images_encoded_total") == IMAGES
        server.process.kill()
        server.process.wait()
    with serving("demo", tmp_path, *options) as server:
        client = client_of(server)
        while (found := client.batches.retrieve(batch.id)).status != "completed":
            time.sleep(0.1)
        asked = server.metric("saccade_batch_lines_total", outcome="answer")
        assert asked <= LINES - done
        told = client.files.content(found.output_file_id or "").text.splitlines()
    results = [json.loads(each) for each in told]
    assert [each["custom_id"] for each in results] == [f"{number}" for number in range(LINES)]
    for number, each in enumerate(results):
        text = each["response"]["body"]["choices"][0]["message"]["content"]
        same = results[number % IMAGES]["response"]["body"]["choices"][0]["message"]["content"]
        assert text == same


def line(number: int, file: str) -> str:
    content = [
        {"type": "file", "file": {"file_id": file}},
        {"type": "text", "text": "What number is this?"},
    ]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 16}
    asked = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**asked, "body": {**body, "temperature": 0}})
