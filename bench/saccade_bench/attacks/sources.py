"""Attacks with image sources: URLs of hosts that never respond, files referenced many times, salts,
and many uploads.
"""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from PIL import Image

from saccade_bench.abuse import attack
from saccade_bench.image_files import data_url, save

CHAT = "/v1/chat/completions"
FETCHING = ("--allow-private-media", "--tune", "fetch_timeout=2")


def png(side: int = 64) -> bytes:
    return save(Image.effect_noise((side, side), 99).convert("RGB"))


def by_url(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(url: str, parts: list[dict[str, object]], **fields: object) -> tuple[str, float]:
    """Send a question. Return the status with the error code, and the seconds waited."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
        **fields,
    }
    begun = time.monotonic()
    try:
        response = httpx.post(url + CHAT, json=body, timeout=200)
    except httpx.TransportError as error:
        return type(error).__name__, time.monotonic() - begun
    code = "" if response.is_success else f" {response.json()['error']['code']}"
    return f"{response.status_code}{code}", time.monotonic() - begun


def count(answers: list[str]) -> str:
    return ", ".join(f"{number} x {answer}" for answer, number in Counter(answers).most_common(4))


@contextmanager
def silent_host() -> Iterator[str]:
    """Serve a host that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as host:
        yield f"http://127.0.0.1:{host.getsockname()[1]}"


@contextmanager
def ordinary_host() -> Iterator[str]:
    data = png()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@attack("4 x 256 URLs of a silent host, then one of another", *FETCHING)
def silent_urls(url: str) -> str:
    with silent_host() as silent, ordinary_host() as ordinary:
        first, _ = ask(url, [by_url(f"{ordinary}/before")])
        answers = [
            ask(url, [by_url(f"{silent}/{turn}/{n}") for n in range(256)])[0] for turn in range(4)
        ]
        after, seconds = ask(url, [by_url(f"{ordinary}/after")])
        return f"{first} before; {count(answers)}; then {after} in {seconds:.1f} s"


@attack("a URL beside another request's 64 silent ones", "--allow-private-media")
def beside_silent_urls(url: str) -> str:
    with silent_host() as silent, ordinary_host() as ordinary, ThreadPoolExecutor(1) as threads:
        hog = threads.submit(ask, url, [by_url(f"{silent}/{n}") for n in range(64)])
        time.sleep(1)
        beside, seconds = ask(url, [by_url(f"{ordinary}/beside")])
        return f"{beside} in {seconds:.1f} s; the others: {hog.result()[0]}"


@attack("a file of 60 MB named 64 times", "--max-inflight-mb", "256")
def named_often(url: str) -> str:
    upload = {"file": ("a.bmp", save(Image.new("RGB", (5000, 4000)), "BMP"), "image/bmp")}
    made = httpx.post(f"{url}/v1/files", data={"purpose": "vision"}, files=upload, timeout=60)
    part: dict[str, object] = {
        "type": "image_file",
        "image_file": {"file_id": made.json()["id"], "max_pixels": 8192},
    }
    with ThreadPoolExecutor(3) as threads:
        answers = [each[0] for each in threads.map(lambda _: ask(url, [part] * 64), range(3))]
    httpx.delete(f"{url}/v1/files/{made.json()['id']}", timeout=60)
    return count(answers)


@attack("60 salts of 5 MB, each with an image")
def salts(url: str) -> str:
    data = data_url(png())
    answers = [ask(url, [by_url(data)], cache_salt=f"{n}" + "s" * 5_000_000)[0] for n in range(60)]
    return count(answers)


@attack("2,400 uploads of a byte, then lists", "--files-dir", "FILES:1MiB")
def many_files(url: str) -> str:
    answers, longest = [], 0.0
    with httpx.Client(base_url=url, timeout=60) as client:
        for n in range(2400):
            begun = time.monotonic()
            made = client.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("x", str(n).encode())}
            )
            longest = max(longest, time.monotonic() - begun)
            answers.append(str(made.status_code))
        begun = time.monotonic()
        listed = len(client.get("/v1/files").json()["data"])
        seconds = time.monotonic() - begun
    return (
        f"{count(answers)}; longest {longest * 1e3:.0f} ms; "
        f"{listed} listed in {seconds * 1e3:.0f} ms"
    )
