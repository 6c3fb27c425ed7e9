"""`saccade chat --base-url`: one streamed question to any OpenAI-compatible server."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx


def ask_server(base_url: str, api_key: str | None, model: str | None, question: str, images: Sequence[Path], max_tokens: int) -> int:
    """Print the answer as it comes. Returns the exit status: 1 when a picture cannot be read or the server refuses."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in images]
        with httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=600) as client:
            name = model or client.get("/models").raise_for_status().json()["data"][0]["id"]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
            body = {"model": name, "messages": messages, "max_tokens": max_tokens, "stream": True}
            with client.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    print(response.read().decode(), file=sys.stderr)
                    return 1
                return print_stream(response)
    except (OSError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def print_stream(response: httpx.Response) -> int:
    """Print the text of a stream of chat completion chunks."""
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            print(f"\nerror: {event['error']['message']}", file=sys.stderr)
            return 1
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    return 0


def data_url(path: Path) -> str:
    """The file as a data URL. Raises OSError."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
