"""`saccade chat --base-url`: one streamed question to any OpenAI-compatible server."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from saccade.core.errors import ConfigError, SaccadeError
from saccade.tools.server import cause, first_model, refusal, root, said, unreachable

TIMEOUT = 600.0


def ask_server(
    base_url: str,
    api_key: str | None,
    model: str | None,
    question: str,
    images: Sequence[Path],
    max_tokens: int,
) -> None:
    """Print the answer as it comes.

    Raises a SaccadeError when a picture cannot be read, or the server is not there or refuses.
    """
    address = root(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(path)}} for path in images
    ]
    name = model or first_model(address, headers, TIMEOUT)
    try:
        with httpx.Client(headers=headers, timeout=TIMEOUT) as client:
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
            body = {"model": name, "messages": messages, "max_tokens": max_tokens, "stream": True}
            with client.stream("POST", f"{address}/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise SaccadeError(
                        refusal(response.status_code, response.read().decode(errors="replace"))
                    )
                print_stream(response)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise unreachable(address, error) from None
    except httpx.HTTPError as error:
        raise SaccadeError(f"{address}: {cause(error)}") from None


def print_stream(response: httpx.Response) -> None:
    """Print the text of a stream of chat completion chunks.

    Raises SaccadeError for one that ends in an error.
    """
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            print()
            raise SaccadeError(said(event) or json.dumps(event["error"]))
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


def data_url(path: Path) -> str:
    """The file as a data URL. Raises ConfigError."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    try:
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise ConfigError(f"--image {path}: {error.strerror}") from None
