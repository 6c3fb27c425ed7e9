"""Requests drawn from a grammar of HTTP and of the API, some of them bent: for fuzzing.

Owns what is drawn; the same seed draws the same. A request is bytes to be written on a connection
of its own. Knows nothing of what the server should answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{id}"),
    ("DELETE", "/v1/files/{id}"),
    ("GET", "/v1/files/{id}/content"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/v1/responses/{id}"),
    ("GET", "/v1/responses/{id}/input_items"),
    ("DELETE", "/v1/responses/{id}"),
    ("POST", "/v1/responses/{id}/cancel"),
    ("POST", "/v1/embeddings"),
)
FIELDS = [
    "background",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "reasoning",
    "reasoning_effort",
    "text",
    "truncation",
    "verbosity",
    "best_of",
    "cache_control",
    "cache_salt",
    "context_management",
    "echo",
    "frequency_penalty",
    "guided_json",
    "ignore_eos",
    "image_detail",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "output_config",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt",
    "prompt_cache_diagnostics",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prompt_logprobs",
    "repetition_penalty",
    "response_format",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "structured_outputs",
    "system",
    "temperature",
    "thinking",
    "tokens",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "trace",
    "user",
]
URLS = (
    "data:image/png;base64,iVBORw0KGgo=",
    "data:,",
    "data:image/png;base64,%%%",
    "file:///etc/passwd",
    "file:",
    "http://",
    "http://[::1",
    "http://127.0.0.1:9/x",
    "ftp://x/y",
    "\u0000",
    "",
)
TEXTS = (
    "",
    "hi",
    "a" * 300,
    "\u0000",
    "\ud800",
    "é𝄞\u200d",
    "<|im_start|>system",
    "<|image_pad|>",
    "{{ 7*7 }}",
    "../../etc/passwd",
    "file-" + "0" * 64 + "-00000000",
    "null",
    "²",
)
INTEGERS = (0, 1, -1, 2, 3, 20, 128, 2**31, -(2**63), 2**63, 10**12)
QUERIES = ("1", "0", "-1", "asc", "%00", "9" * 30, "", "a%26b", "vision")
FLOATS = (0.0, -0.0, 0.5, 1.0, 8.0, 1e-320, 1e308, -1e308, 3.5)
KINDS = (
    "application/json",
    "application/json; charset=utf-8",
    "APPLICATION/JSON",
    "text/plain",
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "",
    ";",
)
ODD_HEADERS = (
    "x-request-id: é",
    "x-request-id: " + "y" * 300,
    "authorization: bearer",
    "authorization: Basic eDp5",
    "content-encoding: gzip",
    "content-encoding: identity",
    "expect: 100-continue",
    "connection: close",
    "connection: upgrade",
    "upgrade: websocket",
    "accept: */*;q=²",
    "range: bytes=9-1",
    "origin: null",
    "cookie: " + "z" * 4000,
    "host: other",
    "transfer-encoding: gzip",
    "x y: z",
    ":",
)


DIGITS = 10**3000
"""Too long to be read as any number; short enough to be written."""
HARD_INTEGERS = (2**64 - 1, 2**64, 2**128, -(2**64), DIGITS)
HARD_URLS = ("http://xn--/", "http://xn--zzzzzzzz99999999999/", "http://\ud800/", "file:////x")
HARD_QUERIES = ("%C2%B2", "9" * 5000)


LARKS = (
    'start: "a"',
    "start: <[0]> <[1]> <[2]>",
    'start: ("a" <[2]>)* "b"',
    "start: <[0-300]>",
    'start: t "q"\nt[lazy]: /a*b*/',
    'start: t u\nt[max_tokens=2]: /.*/\nu[suffix="a"]: /.*/',
    "start: a\na: a a | ",
    "start: T\nT: " + " & ".join(f"/(?s:.*)[ab].{{{i}}}c(?s:.*)/" for i in range(30)),
    "start: @answer",
    '%llguidance {"no_forcing": true}\nstart: "abc" <|im_end|> "d"',
    "start: /(.*[ab].{14}c)|(.*[bd].{15}e)|(.*[ac].{16}f)/",
)
SCHEMAS: tuple[object, ...] = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}},
    {"allOf": [{"pattern": f"[ab].{{{i}}}c"} for i in range(30)], "type": "string"},
    {"enum": ["\u0000", None, 10**30, 1e308, "<|im_end|>"]},
    {"type": "string", "maxLength": 10**9, "minLength": 3},
    {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#"}}},
    {"type": "number", "minimum": 1e308},
    True,
    False,
    {},
)


class Grammar:
    """Draws requests. `model` is a name that the server knows. `hard`: also what once broke it."""

    def __init__(self, seed: int, model: str = "demo", hard: bool = False) -> None:
        self._draw = random.Random(seed)
        self._model = model
        self._integers = INTEGERS + HARD_INTEGERS * hard
        self._urls = URLS + HARD_URLS * hard
        self._queries = QUERIES + HARD_QUERIES * hard

    def requests(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self.request()

    def request(self) -> bytes:
        """One request, whole, unless bent."""
        draw = self._draw
        method, path = draw.choice(ROUTES[:8] * 3 + ROUTES)
        if draw.random() < 0.05:
            method = draw.choice(("HEAD", "OPTIONS", "PUT", "PATCH", "get", "TRACE"))
        kind, body = self.body(path) if method in ("POST", "PUT", "PATCH") else ("", b"")
        lines = ["host: localhost"]
        if kind:
            lines.append(f"content-type: {kind}")
        lines += [draw.choice(ODD_HEADERS) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
        if draw.random() < 0.15 and body:
            lines.append("transfer-encoding: chunked")
            body = self._chunked(body)
        elif body or draw.random() < 0.1:
            lines.append(f"content-length: {len(body)}")
        version = "HTTP/1.1" if draw.random() < 0.95 else draw.choice(("HTTP/1.0", "HTTP/2", ""))
        start = f"{method} {self._path(path)} {version}"
        head = "\r\n".join([start, *lines, "", ""]).encode("latin-1", "replace")
        return self._bent(head) + body if draw.random() < 0.05 else head + body

    def _path(self, path: str) -> str:
        draw = self._draw
        ids = ("demo", "x", "%00", "%2e%2e%2f", "file-" + "0" * 64 + "-00000000", "%ff", "a/b", "")
        path = path.replace("{id}", draw.choice(ids))
        if draw.random() < 0.05:
            path = draw.choice(("/", "*", "//", path + "/", path.upper(), "/%zz", "/" + "q" * 2000))
        if draw.random() < 0.2:
            names = ("limit", "after", "order", "purpose", "x")
            path += f"?{draw.choice(names)}={draw.choice(self._queries)}"
        return path

    def body(self, path: str) -> tuple[str, bytes]:
        """A content type, and a body for a path, of which some are no JSON."""
        draw = self._draw
        if path == "/v1/files":
            return self.upload()
        body = self._ask(path)
        if draw.random() < 0.3:
            body |= self._wish(path)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            body[draw.choice(FIELDS)] = self._value(3)
        if draw.random() < 0.05:
            body.pop(draw.choice(list(body)), None)
        data = json.dumps(body, ensure_ascii=draw.random() < 0.7).encode("utf-8", "surrogatepass")
        if draw.random() < 0.08:
            data = self._bent(data)
        elif draw.random() < 0.04:
            data = draw.choice(
                (b"", b"[]", b"nul", b"[" * 5000, b'"' + b"x" * 9000, b"\xef\xbb\xbf{}")
            )
        kind = KINDS[0] if draw.random() < 0.9 else draw.choice(KINDS)
        return kind, data

    def _wish(self, path: str) -> dict[str, object]:
        """What the answer is to look like, and what is asked of the caches."""
        draw = self._draw
        schema = draw.choice(SCHEMAS)
        wishes: list[dict[str, object]]
        named: dict[str, object] = {"type": "json_schema", "name": "x", "schema": schema}
        tool: dict[str, object] = {"name": draw.choice(("f", "f", "<|im_end|>")), "strict": True}
        choice = draw.choice(("auto", "required", "none", {"type": "function", "name": "f"}))
        ttl = draw.choice(("1s", "5m", "24h", "0s", "99999h", None))
        if path == "/v1/responses":
            function = {"type": "function", "parameters": schema, **tool}
            wishes = [
                {"text": {"format": named}},
                {"tools": [function], "tool_choice": choice},
                {"prompt_cache_options": {"ttl": ttl}},
                {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
                {"stream": True, "tools": [function], "tool_choice": "required"},
            ]
            return draw.choice(wishes)
        if path.startswith("/v1/messages"):
            format = {"type": "json_schema", "schema": schema}
            custom = {"name": tool["name"], "input_schema": schema}
            most: dict[str, object] = (
                {"max_tokens": draw.choice((3, 30, 60))} if path == "/v1/messages" else {}
            )
            wishes = [
                {"output_config": {"format": format}},
                {"tools": [custom], "tool_choice": {"type": "any"}, **most},
                {"cache_control": {"type": "ephemeral", "ttl": ttl}},
            ]
            return draw.choice(wishes)
        function = {"type": "function", "function": {"parameters": schema, **tool}}
        whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        wishes = [
            {"guided_grammar": draw.choice(LARKS)},
            {"structured_outputs": {"grammar": draw.choice(LARKS)}, "n": 2},
            {"guided_json": schema, "guided_whitespace_pattern": draw.choice(("( |a)*", " "))},
            {"response_format": whole, "stream": draw.random() < 0.5, "logprobs": True},
            {"tools": [function], "tool_choice": choice, "max_tokens": 60},
            {"tools": [function], "tool_choice": "required", "response_format": whole},
            {"prompt_logprobs": draw.choice((0, 3, 20)), "n": draw.choice((1, 3))},
            {"echo": True, "logprobs": 2, "max_tokens": 0},
            {"prompt_cache_options": {"mode": "implicit", "ttl": ttl}, "cache_salt": "a"},
            {"prompt_cache_diagnostics": True, "prompt_cache_key": self._text()},
        ]
        return draw.choice(wishes)

    def _ask(self, path: str) -> dict[str, object]:
        draw = self._draw
        body: dict[str, object] = {"model": self._model}
        if path == "/detokenize":
            return body | {"tokens": [draw.randrange(300) for _ in range(3)]}
        if path == "/v1/responses":
            return body | {"max_output_tokens": 2, "input": self._input()}
        if path == "/v1/completions":
            return body | {"max_tokens": 2, "prompt": draw.choice(("hi", [1, 2], ["a", "b"], []))}
        if path.startswith("/v1/messages"):
            return body | self._anthropics_ask(path)
        if path == "/v1/chat/completions":
            body["max_tokens"] = draw.choice((1, 2, 3))
        return body | {"messages": [self._message() for _ in range(draw.choice((1, 1, 2, 3)))]}

    def _input(self) -> object:
        draw = self._draw
        if draw.random() < 0.3:
            return self._text()
        items: list[Callable[[], object]] = [
            self._message,
            self._message,
            lambda: {"type": "message", "role": "user", "content": [self._content()]},
            lambda: {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            lambda: {"type": "function_call_output", "call_id": "c", "output": [self._content()]},
            lambda: {"type": "reasoning", "summary": [], "content": self._value(2)},
            lambda: {"type": "item_reference", "id": self._text()},
            lambda: {"type": self._text(), "id": self._value(1)},
        ]
        return [draw.choice(items)() for _ in range(draw.choice((0, 1, 1, 2, 4)))]

    def _content(self) -> object:
        draw = self._draw
        return draw.choice(
            (
                {"type": "input_text", "text": self._text()},
                {"type": "output_text", "text": self._text(), "annotations": self._value(1)},
                {"type": "refusal", "refusal": self._text()},
                {"type": "input_image", "image_url": draw.choice(self._urls)},
                {"type": "input_image", "uuid": self._text()},
                {"type": "input_file", "file_data": self._text()},
                self._value(2),
            )
        )

    def _message(self) -> object:
        draw = self._draw
        if draw.random() < 0.05:
            return self._value(2)
        role = draw.choice(("user", "user", "system", "assistant", "tool", "x"))
        parts: list[Callable[[], object]] = [
            lambda: {"type": "text", "text": self._text()},
            lambda: {"type": "image_url", "image_url": {"url": draw.choice(self._urls)}},
            lambda: {"type": "image_url", "image_url": draw.choice(self._urls)},
            lambda: {"type": "file", "file": {"file_id": self._text()}},
            lambda: {"type": "image_url", "image_url": None, "uuid": self._text()},
            lambda: {"type": "input_image", "file_id": self._text(), "detail": "high"},
            lambda: self._value(2),
        ]
        content: object = self._text()
        if draw.random() < 0.4:
            content = [draw.choice(parts)() for _ in range(draw.choice((0, 1, 2, 3)))]
        message = {"role": role, "content": content}
        if draw.random() < 0.1:
            message[draw.choice(("name", "tool_calls", "tool_call_id", "id", "x"))] = self._value(2)
        return message

    def _anthropics_ask(self, path: str) -> dict[str, object]:
        draw = self._draw
        body: dict[str, object] = {}
        if path == "/v1/messages":
            body["max_tokens"] = draw.choice((0, 1, 2, 3))
        if draw.random() < 0.3:
            body["system"] = draw.choice((self._text(), [self._block(0)], self._value(2)))
        if draw.random() < 0.3:
            schema = draw.choice(({}, {"type": "object"}, self._value(2)))
            tool = {"name": self._text(), "input_schema": schema}
            kinds = ("web_search_20250305", "custom", None)
            body["tools"] = [draw.choice((tool, tool | {"type": draw.choice(kinds)}))]
            choice = {"type": draw.choice(("auto", "any", "none", "tool"))}
            body["tool_choice"] = draw.choice((choice, choice | {"name": self._text()}, None))
        if draw.random() < 0.1:
            format = {"type": "json_schema", "schema": self._value(2)}
            body["output_config"] = {"format": draw.choice((format, self._value(2)))}
        messages = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            blocks = [self._block(2) for _ in range(draw.choice((0, 1, 1, 2)))]
            content = draw.choice((self._text(), blocks))
            messages.append({"role": draw.choice(("user", "assistant")), "content": content})
        return body | {"messages": messages}

    def _block(self, depth: int) -> object:
        """A block of a message of Anthropic's; with `depth` one that may hold others."""
        draw = self._draw
        sources: list[object] = [
            {"type": "url", "url": draw.choice(self._urls)},
            {"type": "file", "file_id": self._text()},
            {"type": "base64", "media_type": "image/png", "data": self._text()},
            {"type": "text", "media_type": "text/plain", "data": self._text()},
            {"type": "content", "content": [{"type": "text", "text": self._text()}]},
            self._value(2),
        ]
        text: dict[str, object] = {"type": "text", "text": self._text()}
        blocks: list[dict[str, object]] = [
            text,
            {"type": "image", "source": draw.choice(sources)},
            {"type": "document", "source": draw.choice(sources)},
            {"type": "thinking", "thinking": self._text(), "signature": ""},
            {"type": "redacted_thinking", "data": self._text()},
            {"type": "tool_use", "id": "t", "name": self._text(), "input": self._value(3)},
            {"type": "server_tool_use", "id": "t", "name": "web_search", "input": {}},
        ]
        if depth:
            inside = [self._block(depth - 1) for _ in range(draw.choice((0, 1, 2)))]
            result = {"type": "tool_result", "tool_use_id": "t", "is_error": draw.random() < 0.3}
            blocks += [result | {"content": draw.choice((self._text(), inside, None))}] * 2
        block = draw.choice(blocks if depth else blocks[:1])
        if draw.random() < 0.2:
            ttl = draw.choice(("5m", "1h", "9d", None))
            block = block | {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        return block if draw.random() < 0.97 else self._value(2)

    def upload(self) -> tuple[str, bytes]:
        """The content type and bytes of a form with a file."""
        draw = self._draw
        disposition = 'Content-Disposition: form-data; name="{}"'
        fields = [("purpose", draw.choice(("vision", "batch", "user_data", "x", "")))]
        if draw.random() < 0.2:
            fields += [("expires_after[anchor]", "created_at")]
            fields += [("expires_after[seconds]", draw.choice(("3600", "1", "x", "-1")))]
        if draw.random() < 0.1:
            fields.append((draw.choice(("y", "purpose", "")), "z"))
        blocks = [f"--x\r\n{disposition.format(name)}\r\n\r\n{value}\r\n" for name, value in fields]
        name = draw.choice(("a.png", "", "../x", "é", "n" * 300))
        file = disposition.format("file") + f'; filename="{name}"'
        blocks.append(f"--x\r\n{file}\r\n\r\n{draw.choice(('', 'junk', 'GIF89a', 'x' * 3000))}\r\n")
        data = ("".join(blocks) + "--x--\r\n").encode()
        if draw.random() < 0.2:
            data = self._bent(data)
        return "multipart/form-data; boundary=x" if draw.random() < 0.9 else draw.choice(
            KINDS
        ), data

    def _value(self, depth: int) -> object:
        draw = self._draw
        choice = draw.randrange(8 if depth else 5)
        if choice == 0:
            return draw.choice(self._integers)
        if choice == 1:
            return draw.choice(FLOATS)
        if choice == 2:
            return self._text()
        if choice in (3, 4):
            return draw.choice((None, True, False))
        if choice == 5:
            return [self._value(depth - 1) for _ in range(draw.choice((0, 1, 2, 20)))]
        names = [*FIELDS[:6], "type", "url", "function", "name", "include_usage", "1", ""]
        return {draw.choice(names): self._value(depth - 1) for _ in range(draw.choice((0, 1, 3)))}

    def _text(self) -> str:
        return self._draw.choice(TEXTS)

    def _chunked(self, body: bytes) -> bytes:
        draw, pieces = self._draw, []
        while body:
            size = draw.choice((1, 5, 100, len(body)))
            pieces.append(b"%x\r\n%b\r\n" % (len(body[:size]), body[:size]))
            body = body[size:]
        end = draw.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0;ext=1\r\n\r\n"))
        return b"".join(pieces) + end

    def _bent(self, data: bytes) -> bytes:
        """With some bytes changed, doubled or left out."""
        draw, bent = self._draw, bytearray(data)
        for _ in range(draw.choice((1, 2, 5))):
            if not bent:
                break
            at = draw.randrange(len(bent))
            action = draw.randrange(3)
            if action == 0:
                bent[at] = draw.randrange(256)
            elif action == 1:
                del bent[at]
            else:
                bent[at:at] = bent[at : at + draw.choice((1, 20))]
        return bytes(bent)
