"""A held image is a source: a region of it equals the crop that a client would make (tokens,
answer), and costs no upload, no decode where pixels are held, and a hash when it is seen again.
"""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any

import httpx
import pytest
from blake3 import blake3
from PIL import Image

from saccade_bench.fixtures.server import Server
from saccade_bench.fixtures.tiny import picture
from tests.e2e.ways import WITH_KEY

pytestmark = pytest.mark.more

DECODES, ENCODED = "saccade_decodes_total", "saccade_images_encoded_total"
Box = tuple[int, int, int, int]
BOX: Box = (32, 16, 160, 112)
DIALECTS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
_seeds = itertools.count(49_000)


@pytest.fixture(scope="module")
def server(tiny: Server) -> Server:
    return tiny


def png(height: int = 128, width: int = 192) -> bytes:
    """A picture that no other test has sent."""
    file = io.BytesIO()
    Image.fromarray(picture(height, width, seed=next(_seeds))).save(file, "PNG")
    return file.getvalue()


def cropped(data: bytes, box: Box = BOX) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).crop(box).save(file, "PNG")
    return file.getvalue()


def digest(data: bytes) -> str:
    return f"blake3-{blake3(data).hexdigest()}"


def upload(server: Server, data: bytes) -> str:
    files = {"file": ("a.png", data, "image/png")}
    url, form = f"{server.url}/v1/files", {"purpose": "vision"}
    answer = httpx.post(url, files=files, data=form, headers=WITH_KEY, timeout=60)
    return str(answer.raise_for_status().json()["id"])


def inline(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


def body(dialect: str, images: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request about these images. Each has `base64`, `file_id` or `digest`, and options."""
    if dialect == "messages":
        content: list[Any] = [_block(**each) for each in images]
        content.append({"type": "text", "text": "What?"})
        return {"max_tokens": 4, "messages": [{"role": "user", "content": content}], **fields}
    if dialect == "responses":
        content = [_input(**each) for each in images] + [{"type": "input_text", "text": "What?"}]
        asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
        return {**asked, "temperature": 0, **fields}
    content = [_part(**each) for each in images] + [{"type": "text", "text": "What?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return {**asked, "temperature": 0, **fields}


def _part(base64: str = "", **options: Any) -> dict[str, Any]:
    if "file_id" in options:
        return {"type": "image_file", "image_file": options}
    url = {"url": f"data:image/png;base64,{base64}"} if base64 else {}
    return {"type": "image_url", "image_url": {**url, **options}}


def _input(base64: str = "", **options: Any) -> dict[str, Any]:
    url = {"image_url": f"data:image/png;base64,{base64}"} if base64 else {}
    return {"type": "input_image", **url, **options}


def _block(base64: str = "", file_id: str = "", digest: str = "", **options: Any) -> dict[str, Any]:
    source: dict[str, str] = {"type": "base64", "media_type": "image/png", "data": base64}
    if file_id:
        source = {"type": "file", "file_id": file_id}
    elif digest:
        source = {"type": "digest", "digest": digest}
    return {"type": "image", "source": source, **options}


def ask(server: Server, dialect: str, *images: dict[str, Any], **fields: Any) -> httpx.Response:
    url = f"{server.url}/v1/{PATHS[dialect]}"
    sent = body(dialect, list(images), model="tiny", **fields)
    return httpx.post(url, json=sent, headers=WITH_KEY, timeout=60)


def told(answer: httpx.Response) -> tuple[Any, int]:
    """An answer's words, and the tokens of its prompt."""
    assert answer.status_code == 200, answer.text
    said = answer.json()
    usage = said["usage"]
    if "choices" in said:
        return said["choices"][0]["message"]["content"], usage["prompt_tokens"]
    tokens = usage["input_tokens"]
    if "output" in said:
        return [each["content"][0]["text"] for each in said["output"]], tokens
    tokens += usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return [each["text"] for each in said["content"]], tokens


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_region_of_a_held_image_answers_as_the_crop(server: Server, dialect: str) -> None:
    data = png()
    id = upload(server, data)
    crop = told(ask(server, dialect, inline(cropped(data))))
    for held in ({"file_id": id}, {"digest": digest(data)}):
        assert told(ask(server, dialect, {**held, "region": BOX})) == crop
