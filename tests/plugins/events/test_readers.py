"""Cache events, read by others' own code: Dynamo's selection service, which Ray Serve LLM uses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from saccade.cache.content import Content
from saccade.plugins.events.cache_events import BlockEvents
from saccade.plugins.events.publisher import Endpoints, Publisher
from saccade.plugins.events.schema import AllBlocksCleared
from tests.plugins.events.test_events import SIZE, Traffic

READER = "ai-dynamo-runtime==1.6.1"
"""Fetched once by uv."""
PROGRAM = """
import asyncio, json, sys
from dynamo.llm import SelectionService

async def main():
    service = SelectionService(indexer_threads=1)
    asked = {"model_name": "m", "tenant_id": "default"}
    events, replays, size = sys.argv[1:]
    worker = {"worker_id": 1, "endpoint": "ray://server", "block_size": int(size)}
    worker |= {"max_num_batched_tokens": 1000, "data_parallel_start_rank": 0}
    worker |= {"data_parallel_size": 1, "kv_events_endpoints": {0: events}}
    await service.upsert_worker({**asked, **worker, "replay_endpoint": replays})
    print("ready", flush=True)
    for line in sys.stdin:
        scores = []
        for tokens in json.loads(line):
            answer = await service.overlap_scores({**asked, "token_ids": tokens})
            scores.append(answer["workers"][0]["device_blocks"])
        print(json.dumps(scores), flush=True)
    service.shutdown()

asyncio.run(main())
"""


class TextTraffic(Traffic):
    """Sequences without images, salts and adapters: the reader is asked for tokens alone."""

    def content(self) -> Content:
        return Content(self.prompt(), (), (), "", "")

    def prompt(self) -> list[int]:
        return [self.draw.choice((1, 2)) for _ in range(self.draw.randint(SIZE, 20))]


@contextmanager
def reading(publisher: Publisher) -> Iterator[Callable[[list[list[int]]], list[int]]]:
    """Start a reader, which returns the number of cached blocks of each prompt."""
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--quiet", "--with", READER]
    uv += ["--python", sys.executable, "python", "-c"]
    if subprocess.run([*uv, "import dynamo.llm"], capture_output=True, timeout=200).returncode:
        pytest.skip(f"{READER} cannot be had here")
    ports = (
        each.rpartition(":")[2] for each in (publisher.endpoint, publisher.replay_endpoint or "")
    )
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    with subprocess.Popen(
        [*uv, PROGRAM, *addresses, str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def scores(prompts: list[list[int]]) -> list[int]:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps(prompts), file=process.stdin, flush=True)
            return list(json.loads(process.stdout.readline()))

        yield scores


@pytest.mark.more
@pytest.mark.timeout(300)
def test_dynamo_and_ray_know_how_much_of_a_prompt_is_cached() -> None:
    """The reader comes late, so it asks for a replay of what it has missed."""
    traffic = TextTraffic(7)
    publisher = Publisher(Endpoints("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"), AllBlocksCleared())
    traffic.cache.listen(BlockEvents(publisher, "GPU"), b"model")
    for _ in range(1000):
        traffic.step()
    with reading(publisher) as scores:
        prompts = [traffic.prompt() for _ in range(200)]
        matched = 0
        for _ in range(10):
            for _ in range(100):
                traffic.step()
            deadline = time.monotonic() + 60
            while (found := scores(prompts)) != (known := cached_blocks(traffic, prompts)):
                assert time.monotonic() < deadline, (found, known)
                traffic.step()  # the reader only asks for a replay at the next message
            matched += sum(known)
        assert matched > 10 * len(prompts) / 2
    publisher.close()


def cached_blocks(traffic: Traffic, prompts: list[list[int]]) -> list[int]:
    """Count what the trie has. A token is added to each prompt, since one is left to compute."""
    contents = [Content([*prompt, 3], (), (), "", "") for prompt in prompts]
    return [len(traffic.cache.find(each)) for each in contents]
