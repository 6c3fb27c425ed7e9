"""Does the server grow? Mixed requests for as long as told, and what each process holds meanwhile.

    python -m saccade_bench.soak --requests 100000 --seconds 3000 --output soak.json

Serves a tiny checkpoint with caches so small that all of them evict throughout. Whatever clients do
is in the mixture: chats of several turns, new and known images in bodies, by URL and by file,
salts, streams that are left, requests that are not awaited, and what is refused. Loopback only.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import http.server
import io
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import PIL.Image
import psutil

from saccade_bench.fixtures.server import Server, serving
from saccade_bench.fixtures.tiny import make_checkpoint

CLIENTS = 10
KNOWN_IMAGES = 40
CHAT = "/v1/chat/completions"
WORDS = (
    "how",
    "many",
    "red",
    "circles",
    "are",
    "there",
    "two",
    "blue",
    "squares",
    "the",
    "lazy",
    "dog",
)
OPTIONS = (
    *("--allow-private-media", "--tune", "arena_mb=16", "--max-total-tokens", "4096"),
    *("--embedding-cache-device-mb", "1", "--tune", "embedding_cache_host_mb=2"),
    *("--max-running-requests", "8", "--context-length", "1024"),
)
Answer = tuple[int, bytes]


@dataclass(frozen=True)
class Sample:
    """The state after so many requests. By process: MB resident of its own (`anonymous`: without
    the shared arena and mapped files) and in all, descriptors, threads. `metrics`: values that
    should come back.
    """

    requests: int
    seconds: float
    anonymous: dict[str, float]
    resident: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]
    metrics: dict[str, float]


def sample(server: Server, requests: int, seconds: float) -> Sample:
    """The present resources of the server's processes."""
    anonymous, resident, descriptors, threads = {}, {}, {}, {}
    for name, process in processes(server.process.pid):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            descriptors[name] = process.num_fds()
        except (OSError, psutil.Error):
            continue  # an image worker may end at any time
        found = {key: int(value) for key, value in re.findall(r"(\w+):\s+(\d+)", status)}
        anonymous[name] = round(found["RssAnon"] / 1024, 1)
        resident[name] = round(found["VmRSS"] / 1024, 1)
        threads[name] = found["Threads"]
    names = (
        'saccade_kv_pages{owner="free"}',
        'saccade_kv_pages{owner="prefix"}',
        'saccade_kv_pages{owner="sequence"}',
        "saccade_arena_bytes_in_use",
        "saccade_requests_in_flight",
        "saccade_request_bytes_held",
        "saccade_images_encoded_total",
        "saccade_preemptions_total",
        "saccade_decode_worker_restarts_total",
    )
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    metrics = {
        name: float(line.rsplit(" ", 1)[1])
        for line in lines
        for name in names
        if line.startswith(f"{name} ")
    }
    return Sample(requests, seconds, anonymous, resident, descriptors, threads, metrics)


def processes(front: int) -> Iterator[tuple[str, psutil.Process]]:
    """The server's processes with their names; equal kinds are numbered by age."""
    root = psutil.Process(front)
    yield "front", root
    number: Counter[str] = Counter()
    for process in sorted(root.children(recursive=True), key=lambda each: each.pid):
        try:
            line, parent = " ".join(process.cmdline()), process.parent()
            if "saccade.media.workers.worker" in line:
                nested = parent is not None and "saccade.media.workers.worker" in " ".join(
                    parent.cmdline()
                )
                kind = "image worker" if nested else "nursery"
            else:
                kind = "worker" if "saccade.runtime" in line else "engine"
        except psutil.Error:
            continue
        number[kind] += 1
        yield f"{kind} {number[kind]}", process


def image(seed: int) -> bytes:
    """A small noisy image, of a size and format that follow from `seed`."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(24, 97, 2)
    file = io.BytesIO()
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file, ("PNG", "JPEG", "WEBP")[seed % 3])
    return file.getvalue()


@contextmanager
def images_by_url() -> Iterator[str]:
    """A host of images: /SEED."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = image(int(self.path[1:]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "max-age=5")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Soaker:
    """One client: draws requests and sends them one after another on a connection of its own."""

    def __init__(self, url: str, origin: str, seed: int, images: int) -> None:
        self._draw = random.Random(seed)
        self._images = images
        self._origin = origin
        split = urlsplit(url)
        self._connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=120)
        self._kinds: list[tuple[int, Callable[[], tuple[str, set[int]]]]] = [
            (20, self.text),
            (8, self.talk),
            (12, self.known),
            (12, self.new),
            (6, self.by_url),
            (4, self.file),
            (8, self.stream),
            (6, self.left),
            (4, self.unawaited),
            (6, self.completion),
            (8, self.refused),
            (6, self.other),
        ]
        self.statuses: Counter[str] = Counter()

    def one(self) -> None:
        """Send one request; an unexpected status is kept."""
        weights = [weight for weight, _ in self._kinds]
        _, kind = self._draw.choices(self._kinds, weights)[0]
        try:
            answer, right = kind()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            answer, right = type(error).__name__, set()
        odd = not answer.isdecimal() or int(answer) not in right
        self.statuses[f"{kind.__name__} {answer}{' ODD' if odd else ''}"] += 1

    def _send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _post(self, path: str, **body: object) -> str:
        data = json.dumps(body).encode()
        return str(self._send("POST", path, data, content_type="application/json")[0])

    def _words(self, most: int) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(1, most)))

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"max_tokens": self._draw.randint(1, 4)}
        if self._draw.random() < 0.3:
            fields |= {"temperature": 0.8, "seed": self._draw.randrange(1000), "top_p": 0.9}
        if self._draw.random() < 0.2:
            fields["cache_salt"] = f"tenant {self._draw.randrange(10**6)}"
        if self._draw.random() < 0.1:
            fields |= {"logprobs": True, "top_logprobs": 5}
        if self._draw.random() < 0.1:
            fields |= {"n": self._draw.randint(2, 4), "stop": [self._words(3)]}
        return fields

    def _chat(self, content: object, **fields: object) -> str:
        messages = [{"role": "user", "content": content}]
        return self._post(CHAT, messages=messages, **{**self._fields(), **fields})

    def _part(self, seed: int) -> dict[str, object]:
        data = base64.b64encode(image(seed)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def _about(self, *parts: dict[str, object]) -> list[dict[str, object]]:
        return [*parts, {"type": "text", "text": self._words(8)}]

    def _seed(self) -> int:
        return KNOWN_IMAGES + self._draw.randrange(self._images)

    def text(self) -> tuple[str, set[int]]:
        return self._chat(self._words(60)), {200}

    def talk(self) -> tuple[str, set[int]]:
        """A chat of several turns, in the form of its last turn."""
        first = self._about(self._part(self._draw.randrange(KNOWN_IMAGES)))
        messages: list[dict[str, object]] = [{"role": "user", "content": first}]
        for _ in range(self._draw.randint(1, 4)):
            messages.append({"role": "assistant", "content": self._words(10)})
            messages.append({"role": "user", "content": self._words(20)})
        return self._post(CHAT, messages=messages, **self._fields()), {200}

    def known(self) -> tuple[str, set[int]]:
        count = self._draw.randint(1, 3)
        parts = [self._part(self._draw.randrange(KNOWN_IMAGES)) for _ in range(count)]
        return self._chat(self._about(*parts)), {200}

    def new(self) -> tuple[str, set[int]]:
        return self._chat(self._about(self._part(self._seed()))), {200}

    def by_url(self) -> tuple[str, set[int]]:
        seed = self._draw.choice((self._seed(), self._draw.randrange(KNOWN_IMAGES)))
        url = {"url": f"{self._origin}/{seed}"}
        part: dict[str, object] = {"type": "image_url", "image_url": url}
        return self._chat(self._about(part)), {200}

    def file(self) -> tuple[str, set[int]]:
        """Upload, ask, delete."""
        data = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--x\r\n'
            b'Content-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
            + image(self._seed())
            + b"\r\n--x--\r\n"
        )
        kind = "multipart/form-data; boundary=x"
        status, made = self._send("POST", "/v1/files", data, content_type=kind)
        if status != 200:
            return str(status), {200}
        name = json.loads(made)["id"]
        part: dict[str, object] = {"type": "image_file", "image_file": {"file_id": name}}
        asked = self._chat(self._about(part))
        gone = str(self._send("DELETE", f"/v1/files/{name}")[0])
        return (asked if asked != "200" else gone), {200}

    def stream(self) -> tuple[str, set[int]]:
        return self._chat(self._words(20), stream=True), {200}

    def left(self) -> tuple[str, set[int]]:
        """A long stream whose client goes after the first bytes."""
        fields = {"stream": True, "max_tokens": 200, "ignore_eos": True}
        body = {"messages": [{"role": "user", "content": self._words(20)}], **fields}
        self._connection.request(
            "POST", CHAT, json.dumps(body), {"content-type": "application/json"}
        )
        response = self._connection.getresponse()
        response.read(10)
        self._connection.close()
        return str(response.status), {200}

    def unawaited(self) -> tuple[str, set[int]]:
        """A request with a new image whose client goes at once."""
        content = self._about(self._part(self._seed()))
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 50}
        self._connection.request(
            "POST", CHAT, json.dumps(body), {"content-type": "application/json"}
        )
        time.sleep(self._draw.random() * 0.02)
        self._connection.close()
        return "0", {0}

    def completion(self) -> tuple[str, set[int]]:
        fields = self._fields()
        fields.pop("top_logprobs", None)
        if fields.pop("logprobs", None):
            fields["logprobs"] = 3
        return self._post("/v1/completions", prompt=self._words(40), **fields), {200}

    def refused(self) -> tuple[str, set[int]]:
        draw = self._draw.randrange(5)
        if draw == 0:
            return str(self._send("POST", CHAT, b"{", content_type="application/json")[0]), {400}
        if draw == 1:
            broken = base64.b64encode(image(self._seed())[:60]).decode()
            url = {"url": f"data:image/png;base64,{broken}"}
            part: dict[str, object] = {"type": "image_url", "image_url": url}
            return self._chat(self._about(part)), {400}
        if draw == 2:
            return self._chat("hi", temperature=-self._draw.random()), {400}
        if draw == 3:
            return self._chat("dog " * 2000), {400}
        return self._chat("hi", **{f"field{self._draw.randrange(10**9)}": 1}), {400}

    def other(self) -> tuple[str, set[int]]:
        draw = self._draw.randrange(4)
        if draw == 0:
            return self._post("/tokenize", prompt=self._words(30)), {200}
        if draw == 1:
            return str(self._send("GET", f"/none/{self._draw.randrange(10**9)}")[0]), {404}
        return str(self._send("GET", ("/v1/models", "/v1/files")[draw - 2])[0]), {200}


class Run:
    """So many requests by several clients, within so many seconds, with a sample now and then."""

    def __init__(self, server: Server, origin: str, options: argparse.Namespace) -> None:
        self._server = server
        self._most = options.requests
        self._seconds = options.seconds
        self._begun = time.monotonic()
        self._count = 0
        self._lock = threading.Lock()
        images = options.images or 10**9
        self._soakers = [Soaker(server.url, origin, seed, images) for seed in range(CLIENTS)]
        self.samples: list[Sample] = []

    def _over(self) -> bool:
        return self._count >= self._most or time.monotonic() - self._begun > self._seconds

    def _work(self, soaker: Soaker) -> None:
        while not self._over():
            soaker.one()
            with self._lock:
                self._count += 1

    def go(self, every: int, note: Callable[[], None]) -> None:
        """Until the requests are sent or the time is up; `note` is called after each sample."""
        threads = [threading.Thread(target=self._work, args=(each,)) for each in self._soakers]
        for thread in threads:
            thread.start()
        due = 0
        while not self._over():
            if self._count >= due:
                self._take()
                note()
                due += every
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        time.sleep(3)
        self._take()

    def _take(self) -> None:
        seconds = round(time.monotonic() - self._begun, 1)
        self.samples.append(sample(self._server, self._count, seconds))

    def statuses(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for each in self._soakers:
            total += each.statuses
        return dict(sorted(total.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument(
        "--images",
        type=int,
        default=2000,
        help="different images beside those that come often: far more than the caches hold, and "
        "few enough that names of images seen (65,536 are kept) and answers of hosts (256 MB) stop "
        "growing early; 0: without end",
    )
    parser.add_argument("--every", type=int, default=1000, help="requests between samples")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, images_by_url() as origin:
        folder = Path(name)
        model = make_checkpoint(folder / "model", "qwen3_vl")
        dirs = (
            *("--files-dir", f"{folder / 'files'}:8MiB"),
            *("--embedding-cache-dir", f"{folder / 'disk'}:4MiB"),
        )
        with serving(model, folder, *OPTIONS, *dirs) as server:
            run = Run(server, origin, options)

            def note() -> None:
                log = server.log.read_text(errors="replace")
                result = {
                    "statuses": run.statuses(),
                    "tracebacks": log.count("Traceback (most recent"),
                    "samples": [asdict(each) for each in run.samples],
                }
                options.output.write_text(json.dumps(result))
                last = run.samples[-1]
                print(last.requests, last.seconds, last.anonymous, flush=True)

            run.go(options.every, note)
            note()


if __name__ == "__main__":
    main()
