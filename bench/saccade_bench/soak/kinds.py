"""Every kind of request that a client sends, each as a function of a server and a seed.

It returns the values that must be equal each time the same seed is used.
"""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from saccade_bench.image_files import data_url
from saccade_bench.soak import drawn

CHAT = "/v1/chat/completions"
OK = frozenset({200})
REFUSED = frozenset({400, 404, 413, 415, 422})
MAX_POLLS = 600
DIGITS = 3
"""Digits of numbers that are compared. Results in float32 depend on the batch."""


class UnexpectedStatus(Exception):
    """The response has a status that the request's kind does not expect."""


@dataclass
class SoakClient:
    """A client of the server.

    `origin` is the base URL at which the server can fetch images. `statuses` counts responses by
    status.
    """

    client: httpx.Client
    origin: str
    ranker: str = ""
    model: str = "demo"
    statuses: dict[int, int] = field(default_factory=dict)

    def send(
        self, method: str, path: str, expected: frozenset[int] = OK, **how: Any
    ) -> httpx.Response:
        """Send a request and check the status. Raises UnexpectedStatus."""
        answer = self.client.request(method, path, **how)
        self.check(answer, expected)
        return answer

    def check(self, answer: httpx.Response, expected: frozenset[int] = OK) -> None:
        """Count the status. Raises UnexpectedStatus if it is not expected."""
        status = answer.status_code
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status not in expected:
            raise UnexpectedStatus(f"{status}: {answer.read()[:300].decode(errors='replace')}")

    def post(self, path: str, body: dict[str, Any], expected: frozenset[int] = OK) -> Any:
        """POST a JSON body and return the response's JSON. Raises UnexpectedStatus."""
        return self.send("POST", path, expected, json={"model": self.model, **body}).json()

    def chat(self, content: Any, **fields: Any) -> list[Any]:
        """Send a chat with one message, at temperature 0."""
        return self.chats([{"role": "user", "content": content}], **fields)

    def chats(self, messages: list[dict[str, Any]], **fields: Any) -> list[Any]:
        """Return the text, the tool calls and the finish reason of each choice."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        return [
            [
                each["message"]["content"],
                [call["function"] for call in each["message"].get("tool_calls") or ()],
                each["finish_reason"],
            ]
            for each in self.post(CHAT, body)["choices"]
        ]

    def upload(self, data: bytes, name: str, purpose: str = "vision") -> str:
        """Upload a file and return its id. Raises UnexpectedStatus."""
        how: dict[str, Any] = {"files": {"file": (name, data)}, "data": {"purpose": purpose}}
        return str(self.send("POST", "/v1/files", **how).json()["id"])

    def delete(self, name: str) -> None:
        self.send("DELETE", f"/v1/files/{name}")

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response."""
        whole = {"model": self.model, "stream": True, **body}
        with self.client.stream("POST", path, json=whole) as answer:
            self.check(answer)
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])


def sampled(seed: int) -> dict[str, Any]:
    """Return fields for random sampling with this seed for a third of the seeds."""
    return {"temperature": 0.8, "top_p": 0.9, "seed": seed} if seed % 3 == 0 else {}


def ask_text(asker: SoakClient, seed: int) -> Any:
    return asker.chat(drawn.text(seed), **sampled(seed))


def ask_completion(asker: SoakClient, seed: int) -> Any:
    body = {"prompt": drawn.text(seed), "max_tokens": 8, "temperature": 0, **sampled(seed)}
    return [each["text"] for each in asker.post("/v1/completions", body)["choices"]]


def ask_image(asker: SoakClient, seed: int) -> Any:
    return asker.chat(drawn.about(drawn.part(drawn.image_url(seed))))


def ask_images(asker: SoakClient, seed: int) -> Any:
    """Ask about an image and a region of it, with two choices and log-probabilities."""
    first = drawn.image_url(seed, (160, 120))
    parts = (drawn.part(first), drawn.part(first, region=[10, 10, 90, 80]))
    return asker.chat(drawn.about(*parts), n=2, logprobs=True, top_logprobs=2)


def ask_by_url(asker: SoakClient, seed: int) -> Any:
    return asker.chat(drawn.about(drawn.part(f"{asker.origin}/{seed}")))


def ask_by_file(asker: SoakClient, seed: int) -> Any:
    name = asker.upload(drawn.image(seed), "a.png")
    try:
        return asker.chat(drawn.about({"type": "file", "file": {"file_id": name}}))
    finally:
        asker.delete(name)


def ask_salted(asker: SoakClient, seed: int) -> Any:
    return asker.chat(drawn.about(drawn.part(drawn.image_url(seed))), cache_salt=f"salt {seed}")


def ask_turns(asker: SoakClient, seed: int) -> Any:
    """Send a growing chat with an image in every second turn."""
    messages: list[dict[str, Any]] = []
    for turn in range(4):
        content: Any = drawn.text(seed + turn, 12)
        if turn % 2 == 0:
            content = drawn.about(drawn.part(drawn.image_url(seed + turn)))
        messages.append({"role": "user", "content": content})
        said = asker.chats(messages)[0][0]
        messages.append({"role": "assistant", "content": said})
    return [each["content"] for each in messages[1::2]]


def ask_trimming(asker: SoakClient, seed: int) -> Any:
    """Act as an agent that keeps its last two screenshots."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": drawn.text(seed, 60)}]
    for step in range(5):
        shown = drawn.part(drawn.image_url(3 * (seed + step), (160, 96)))
        messages.append({"role": "user", "content": drawn.about(shown)})
        for old in messages[1:-4:2]:
            old["content"] = "(an old screenshot)"
        messages.append({"role": "assistant", "content": asker.chats(messages)[0][0]})
    return [each["content"] for each in messages[2::2]]


def ask_stream(asker: SoakClient, seed: int) -> Any:
    messages = [{"role": "user", "content": drawn.about(drawn.part(drawn.image_url(seed)))}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    chunks = [each["choices"] for each in asker.events(CHAT, body)]
    return "".join(each[0]["delta"].get("content") or "" for each in chunks if each)


def leave_stream(asker: SoakClient, seed: int) -> Any:
    """Start a long stream, and disconnect after a few events."""
    messages = [{"role": "user", "content": drawn.text(seed)}]
    body = {"messages": messages, "max_tokens": 400, "ignore_eos": True}
    for number, _ in enumerate(asker.events(CHAT, body)):
        if number == 3:
            return None
    raise UnexpectedStatus("a stream that ended early")


def leave_at_once(asker: SoakClient, seed: int) -> Any:
    """Send a request with a new image, and disconnect immediately."""
    messages = [{"role": "user", "content": drawn.about(drawn.part(drawn.image_url(seed)))}]
    body = {"model": asker.model, "messages": messages, "max_tokens": 50}
    wait = httpx.Timeout(60, read=0.001 + seed % 30 / 1000)
    with suppress(httpx.ReadTimeout):
        asker.send("POST", CHAT, json=body, timeout=wait)
    return None


def call_tool(asker: SoakClient, seed: int) -> Any:
    parameters = {
        "type": "object",
        "properties": {"part": {"enum": ["left", "right"]}},
        "required": ["part"],
    }
    tool = {"type": "function", "function": {"name": f"zoom{seed % 5}", "parameters": parameters}}
    look = drawn.about(drawn.part(drawn.image_url(seed)))
    return asker.chat(look, tools=[tool], tool_choice="required", max_tokens=100)


def ask_schema(asker: SoakClient, seed: int) -> Any:
    colours = {"enum": ["red", "green", drawn.text(seed, 1)]}
    schema = {
        "type": "object",
        "properties": {"colour": colours, "count": {"type": "integer", "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    look = drawn.about(drawn.part(drawn.image_url(seed)))
    return asker.chat(look, response_format=form, max_tokens=60)


def ask_message(asker: SoakClient, seed: int) -> Any:
    """Use Anthropic's API, with a stream for odd seeds."""
    source = {"type": "base64", "media_type": "image/png"}
    picture = {**source, "data": base64.b64encode(drawn.image(seed)).decode()}
    content = drawn.about({"type": "image", "source": picture})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
    if seed % 2:
        events = asker.events("/v1/messages", body)
        return "".join(each["delta"].get("text", "") for each in events if "delta" in each)
    return "".join(each["text"] for each in asker.post("/v1/messages", body)["content"])


def said(answer: dict[str, Any]) -> list[Any]:
    """Return the texts and actions of a response."""
    return [
        [each["type"], [part["text"] for part in each.get("content") or ()], each.get("actions")]
        for each in answer["output"]
    ]


def ask_responses(asker: SoakClient, seed: int) -> Any:
    """Upload a file, create a response and a follow-up, and delete everything."""
    name = asker.upload(drawn.image(seed), "a.png")
    shown = {"type": "input_image", "file_id": name}
    question = {"type": "input_text", "text": drawn.QUESTION}
    common = {"temperature": 0, "max_output_tokens": 16}
    given = [{"role": "user", "content": [shown, question]}]
    first = asker.post("/v1/responses", {"input": given, **common})
    again = {"input": drawn.text(seed, 8), "previous_response_id": first["id"], **common}
    second = asker.post("/v1/responses", again)
    asker.send("GET", f"/v1/responses/{second['id']}/input_items")
    for each in (first, second):
        asker.send("DELETE", f"/v1/responses/{each['id']}")
    asker.delete(name)
    return [said(first), said(second)]


def use_computer(asker: SoakClient, seed: int) -> Any:
    """Send two turns of computer use: a task, and a screenshot after the model's action."""
    shown = {"type": "input_image", "image_url": drawn.image_url(3 * seed, (320, 200))}
    task = {"role": "user", "content": [{"type": "input_text", "text": "Click."}, shown]}
    body = {
        "tools": [{"type": "computer"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "temperature": 1,
        "seed": seed,
    }
    first = asker.post("/v1/responses", {"input": [task], **body})
    calls = [each for each in first["output"] if each["type"] == "computer_call"]
    if first["status"] != "completed" or not calls:
        return said(first)
    url = drawn.image_url(3 * (seed + 1), (320, 200))
    screen = {"type": "computer_screenshot", "image_url": url}
    output = {"type": "computer_call_output", "call_id": calls[0]["call_id"], "output": screen}
    second = asker.post("/v1/responses", {"input": [task, *first["output"], output], **body})
    return [said(first), said(second)]


def ask_frames(asker: SoakClient, seed: int) -> Any:
    video = {"type": "video", "video": [*drawn.frames(seed)], "fps": 2, "max_pixels": 6144}
    return asker.chat(drawn.about(video))


def ask_clip(asker: SoakClient, seed: int) -> Any:
    url = {"url": drawn.clip(seed), "fps": 2, "max_pixels": 6144}
    return asker.chat(drawn.about({"type": "video_url", "video_url": url}))


def ask_document(asker: SoakClient, seed: int) -> Any:
    """Ask about a PDF, about one of its pages, or about a region of a page."""
    data = data_url(drawn.document(seed), "application/pdf")
    some = {"page": 1, "region": [10, 10, 150, 120]} if seed % 3 == 2 else {}
    file = {"file_data": data, "filename": "a.pdf", "max_pixels": 65536, **some}
    shown = {"saccade": {"pages": [1]}} if seed % 3 == 1 else {}
    return asker.chat(drawn.about({"type": "file", "file": file}), **shown)


def embed(asker: SoakClient, seed: int) -> Any:
    content = drawn.about(drawn.part(drawn.image_url(seed)))
    messages = [{"role": "user", "content": content}]
    texts = asker.post("/v1/embeddings", {"input": [drawn.text(seed), drawn.text(seed + 1)]})
    images = asker.post("/v1/embeddings", {"messages": messages})
    both = (*texts["data"], *images["data"])
    return [[round(value, DIGITS) for value in each["embedding"]] for each in both]


def decide(asker: SoakClient, seed: int) -> Any:
    shown = {"type": "input_image", "image_url": drawn.image_url(seed)}
    question = {"type": "predicate", "name": "fox", "instructions": drawn.text(seed, 6)}
    levels = [{"label": "dark"}, {"label": "bright"}]
    score = {"type": "score", "name": "light", "instructions": "How bright?", "levels": levels}
    body = {"input": [{"role": "user", "content": [shown]}], "questions": [question, score]}
    first, second = asker.post("/v1/decisions", body)["answers"]
    return [round(each, DIGITS) for each in (first["probability"], second["score"])]


def rank(asker: SoakClient, seed: int) -> Any:
    """Request scores and ranks of texts and an image from the ranking server."""
    picture = {"content": [drawn.part(drawn.image_url(seed))]}
    documents = [drawn.text(seed), picture, drawn.text(seed + 1)]
    body = {"query": drawn.text(seed + 2, 5), "documents": documents}
    ranks = asker.send("POST", f"{asker.ranker}/v1/rerank", json=body).json()["results"]
    pair = {"text_1": drawn.text(seed), "text_2": [drawn.text(seed + 1)]}
    scores = asker.send("POST", f"{asker.ranker}/v1/score", json=pair).json()["data"]
    return [
        [[each["index"], round(each["relevance_score"], DIGITS)] for each in ranks],
        [round(each["score"], DIGITS) for each in scores],
    ]


def run_batch(asker: SoakClient, seed: int) -> Any:
    """Upload a batch of three requests, wait for it, and return the answers."""
    lines = []
    for number in range(3):
        content: Any = drawn.text(seed + number, 10)
        if number:
            content = drawn.about(drawn.part(drawn.image_url(seed + number)))
        messages = [{"role": "user", "content": content}]
        body = {"model": asker.model, "messages": messages, "max_tokens": 8, "temperature": 0}
        line = {"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}
        lines.append(json.dumps(line))
    name = asker.upload("\n".join(lines).encode(), "in.jsonl", "batch")
    wanted = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
    batch = asker.send("POST", "/v1/batches", json=wanted).json()
    for _ in range(MAX_POLLS):
        batch = asker.send("GET", f"/v1/batches/{batch['id']}").json()
        if batch["status"] == "completed":
            break
        time.sleep(0.2)
    found = asker.send("GET", f"/v1/files/{batch['output_file_id']}/content").text
    for each in (name, batch["output_file_id"]):
        asker.delete(each)
    answers = [json.loads(line)["response"]["body"]["choices"] for line in found.splitlines()]
    return [each["message"]["content"] for choices in answers for each in choices]


def _bad_bodies(seed: int) -> Iterable[tuple[str, dict[str, Any]]]:
    broken = drawn.image(3 * seed)[: 60 + seed % 40]
    look = drawn.about(drawn.part(data_url(broken)))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    yield CHAT, {"messages": [{"role": "user", "content": look}]}
    yield CHAT, {**chat, "temperature": -1}
    yield CHAT, {**chat, f"field{seed}": 1}
    yield CHAT, {"messages": [{"role": "user", "content": "dog " * 9000}]}
    yield CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": 1}}}
    yield "/v1/responses", {"input": "hi", "previous_response_id": f"resp_{seed}"}
    yield "/v1/messages", {**chat, "max_tokens": -1}
    yield "/v1/embeddings", {"input": []}
    yield "/v1/batches", {"input_file_id": f"file-{seed}", "endpoint": CHAT}


def refuse(asker: SoakClient, seed: int) -> Any:
    """Send an invalid request, and return the error."""
    bodies = [*_bad_bodies(seed)]
    path, body = bodies[seed % len(bodies)]
    return asker.post(path, body, REFUSED)["error"]  # the rest may include a request id


def refuse_bytes(asker: SoakClient, seed: int) -> Any:
    """Send a body that is not JSON."""
    data = random.Random(seed).randbytes(seed % 2000)
    head = {"content-type": "application/json"}
    asker.send("POST", CHAT, REFUSED, content=b'{"a":' + data, headers=head)
    return None


def look_around(asker: SoakClient, seed: int) -> Any:
    """Send the requests of operators and web pages."""
    for path in ("/health", "/v1/models", "/v1/files", "/metrics", "/openapi.json", "/"):
        asker.send("GET", path)
    asker.send("GET", f"/none/{seed}", REFUSED)
    return asker.post("/tokenize", {"prompt": drawn.text(seed)})["count"]


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    `pool` is the number of seeds, so that requests repeat. 0: each seed is new. `compared` is True
    if the answer must be the same on another server.
    """

    ask: Callable[[SoakClient, int], Any]
    weight: int
    pool: int
    compared: bool = True

    @property
    def name(self) -> str:
        return self.ask.__name__


KINDS = (
    Kind(ask_text, 12, 80),
    Kind(ask_completion, 4, 40),
    Kind(ask_image, 10, 60),
    Kind(ask_image, 12, 0),
    Kind(ask_images, 4, 20),
    Kind(ask_by_url, 4, 60),
    Kind(ask_by_file, 4, 40),
    Kind(ask_salted, 2, 0),
    Kind(ask_turns, 4, 20),
    Kind(ask_trimming, 4, 20),
    Kind(ask_stream, 6, 60),
    Kind(leave_stream, 4, 0, False),
    Kind(leave_at_once, 4, 0, False),
    Kind(call_tool, 3, 20),
    Kind(ask_schema, 3, 20),
    Kind(ask_message, 5, 40),
    Kind(ask_responses, 4, 20),
    Kind(use_computer, 2, 20),
    Kind(ask_frames, 3, 12),
    Kind(ask_clip, 2, 6),
    Kind(ask_document, 3, 9),
    Kind(embed, 3, 20),
    Kind(decide, 3, 20),
    Kind(rank, 3, 20),
    Kind(run_batch, 2, 10),
    Kind(refuse, 6, 45),
    Kind(refuse_bytes, 2, 0, False),
    Kind(look_around, 2, 20),
)
