"""A conversation about a picture through POST /v1/responses, with the unchanged openai SDK.

    saccade serve                        # in another terminal
    python examples/responses.py cat.png "What is this?" "Which colour has it?"

The picture is sent once. Later questions refer to the previous response, and the server finds the
conversation, its KV pages and the picture's embedding in its caches.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--key", default="none")
    parser.add_argument("--max-output-tokens", type=int, default=200)
    given = parser.parse_args()

    client = openai.OpenAI(
        base_url=f"{given.base_url.rstrip('/').removesuffix('/v1')}/v1", api_key=given.key
    )
    model = client.models.list().data[0].id
    kind = mimetypes.guess_type(given.picture)[0] or "image/png"
    data = base64.b64encode(given.picture.read_bytes()).decode()
    image = {"type": "input_image", "image_url": f"data:{kind};base64,{data}"}

    previous: str | None = None
    for question in given.questions:
        text = {"type": "input_text", "text": question}
        content: list[Any] = [text] if previous else [image, text]
        with client.responses.stream(
            model=model,
            input=[{"role": "user", "content": content}],
            max_output_tokens=given.max_output_tokens,
            **({"previous_response_id": previous} if previous else {}),
        ) as stream:
            print(f"> {question}")
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                elif event.type in ("response.completed", "response.incomplete"):
                    previous, usage = event.response.id, event.response.usage
        assert usage is not None
        cached = usage.input_tokens_details.cached_tokens
        print(f"\n  ({usage.input_tokens} tokens of input, {cached} of them cached)")


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
