"""Use Saccade with Anthropic's own SDK and with Claude Code.

    saccade serve demo &
    pip install anthropic
    python examples/messages.py [PICTURE.png] [--base-url http://127.0.0.1:8000]

The SDK only needs the address. Claude Code is configured by environment variables. It requests
models by its own names unless it is configured with the server's (`GET /v1/models`):

    export ANTHROPIC_BASE_URL=http://127.0.0.1:8000
    export ANTHROPIC_AUTH_TOKEN=any           # the server's --api-key, if it has one
    export ANTHROPIC_MODEL=demo ANTHROPIC_DEFAULT_HAIKU_MODEL=demo
    export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
    claude -p "What is in this folder?"

Its prompt has about 20,000 tokens: serve a model that calls tools and has a large enough context.
"""

from __future__ import annotations

import argparse
import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import anthropic


def png(width: int = 128, height: int = 128) -> bytes:
    """Return a PNG of a red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = (b"\0" + b"\xff\0\0" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def main(url: str, data: bytes) -> None:
    """Ask two questions about a picture. The second time, most of the prompt is cached.

    The demo model can answer questions like these. You can ask other models anything.
    """
    address = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients need /v1; this SDK adds it
    client: Any = anthropic.Anthropic(base_url=address, api_key="any")
    model = client.models.list().data[0].id
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    picture = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    for question in ("What shape is red?", "What colour is the square?"):
        content = [picture, {"type": "text", "text": question}]
        asked = {"model": model, "messages": [{"role": "user", "content": content}]}
        count = client.messages.count_tokens(**asked).input_tokens
        print(f"{question} ({count} tokens)")
        with client.messages.stream(**asked, max_tokens=64) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            usage = stream.get_final_message().usage
        print(f"\n  read from the cache: {usage.cache_read_input_tokens} tokens\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("picture", nargs="?", type=Path, help="none: a red square")
    given = parser.parse_args()
    try:
        main(given.base_url, given.picture.read_bytes() if given.picture else png())
    except anthropic.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
