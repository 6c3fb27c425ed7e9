"""What a hop through `saccade route` costs: CPU time of the router per request and per event of a
stream, and what a client sees, beside the same requests sent to the worker itself, in turns.

    python -m saccade_bench.route_hop --output route_hop.json

The worker answers at once and does nothing else (a process of its own), so that all there is to see
is the hop. Loopback only; one client, one connection at a time, but for the last row.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvicorn
import uvloop

ROUNDS = 4
EVENTS = 200
ANSWER = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
EVENT = b"data: " + json.dumps({"choices": [{"delta": {"content": "yes"}}]}).encode() + b"\n\n"


async def answer(_scope: Any, receive: Any, send: Any) -> None:
    """The worker."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    stream = b'"stream": true' in body[-40:]
    kind = b"text/event-stream" if stream else b"application/json"
    headers = [(b"content-type", kind), (b"x-saccade-instance", b"00000000")]
    if not stream:
        headers.append((b"content-length", str(len(ANSWER)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(EVENTS if stream else 0):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"" if stream else ANSWER})


def work(told: Connection) -> None:
    config = uvicorn.Config(answer, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        told.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    uvloop.run(run())


def body(kilobytes: int, stream: bool) -> bytes:
    """A chat about an image of so many kilobytes; 0: about none."""
    text = {"type": "text", "text": "what is it?"}
    data = base64.b64encode(random.Random(0).randbytes(kilobytes * 1024)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [*([image] if kilobytes else []), text]
    told = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream}
    return json.dumps(told).encode()


async def send(url: str, payload: bytes, count: int, abreast: int) -> list[float]:
    """Seconds of each request."""
    seconds: list[float] = []
    headers = {"content-type": "application/json"}

    async def ask(session: aiohttp.ClientSession) -> None:
        for _ in range(count // abreast):
            began = time.perf_counter()
            async with session.post(url, data=payload, headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()
            seconds.append(time.perf_counter() - began)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(session) for _ in range(abreast)))
    return seconds


def measure(urls: dict[str, str], router: psutil.Process, row: Sequence[Any]) -> dict[str, Any]:
    name, kilobytes, stream, count, abreast = row
    payload = body(kilobytes, stream)
    seconds: dict[str, list[float]] = {way: [] for way in urls}
    spent, sent = 0.0, 0
    for _ in range(ROUNDS):
        for way, url in urls.items():
            before = router.cpu_times()
            seconds[way] += uvloop.run(send(url, payload, count, abreast))
            if way == "routed":
                after = router.cpu_times()
                spent += after.user + after.system - before.user - before.system
                sent += count
    medians = {way: 1e3 * statistics.median(each) for way, each in seconds.items()}
    return {
        "request": name,
        "requests": sent,
        "router_cpu_ms": round(1e3 * spent / sent, 3),
        "direct_ms": round(medians["direct"], 3),
        "routed_ms": round(medians["routed"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(there,), daemon=True)
    worker.start()
    port = here.recv()
    command = [sys.executable, "-m", "saccade", "route", "--port", "0"]
    command += ["--workers", f"http://127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(line for line in process.stdout if line.startswith("routing at")).split()[2]
        path = "/v1/chat/completions"
        urls = {"direct": f"http://127.0.0.1:{port}{path}", "routed": address[:-3] + path}
        router = psutil.Process(process.pid)
        rows = [
            measure(urls, router, row)
            for row in (
                ("text", 0, False, 1000, 1),
                ("image of 20 KB", 20, False, 1000, 1),
                ("image of 1 MB", 1000, False, 60, 1),
                (f"stream of {EVENTS} events", 0, True, 60, 1),
                ("text, 16 abreast", 0, False, 1600, 16),
            )
        ]
    finally:
        process.terminate()
        process.wait(20)
        worker.kill()
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
