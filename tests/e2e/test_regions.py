"""A held image is a source: a region of it equals the crop that a client would make (tokens,
answer), and costs no upload, no decode where pixels are held, and a hash when it is seen again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import secrets
from typing import Any

import httpx
import pytest
from blake3 import blake3
from PIL import Image

from saccade.tools.send_once import NamedBody
from saccade_bench.fixtures.server import Server
from tests.e2e.ways import WITH_KEY
from tests.fixtures.tiny import picture
from tests.media.pictures import encode

pytestmark = pytest.mark.more

DECODES, ENCODED = "saccade_decodes_total", "saccade_images_encoded_total"
Box = tuple[int, int, int, int]
BOX: Box = (32, 16, 160, 112)
DIALECTS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
_seeds = itertools.count(secrets.randbits(40))
"""An earlier run's uploads may still be kept."""


def png(height: int = 128, width: int = 192) -> bytes:
    """A picture that no other test has sent."""
    return encode(picture(height, width, seed=next(_seeds)))


def cropped(data: bytes, box: Box = BOX) -> bytes:
    return encode(Image.open(io.BytesIO(data)).crop(box))


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
    return server.send(f"/v1/{PATHS[dialect]}", body(dialect, list(images), model="tiny", **fields))


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


def counts(server: Server) -> dict[str, float]:
    return {name: server.metric(name) for name in (DECODES, ENCODED)}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_region_of_a_held_image_answers_as_the_crop(server: Server, dialect: str) -> None:
    data = png()
    id = upload(server, data)
    crop = told(ask(server, dialect, inline(cropped(data))))
    for held in ({"file_id": id}, {"digest": digest(data)}):
        assert told(ask(server, dialect, {**held, "region": BOX})) == crop


def test_a_region_costs_no_upload_and_further_ones_no_decode(server: Server) -> None:
    """Of one file: the first region has it decoded, the same again costs a hash."""
    data = png()
    held = {"file_id": upload(server, data)}
    sizes, spent = [], []
    for box in (BOX, (0, 0, 64, 96), BOX):
        before = counts(server)
        answer = ask(server, "chat", {**held, "region": box})
        assert answer.status_code == 200
        sizes.append(len(answer.request.content))
        spent.append([counts(server)[name] - before[name] for name in before])
    assert spent == [[1, 1], [0, 1], [0, 0]]
    assert max(sizes) < len(data) / 4


def test_a_flush_forgets_held_pixels(server: Server) -> None:
    held = {"file_id": upload(server, png()), "region": BOX}
    before = counts(server)[DECODES]
    for _ in range(2):
        told(ask(server, "chat", held))
        server.post("/flush_cache")
    assert counts(server)[DECODES] == before + 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_digest_names_an_image_of_the_same_body(server: Server, dialect: str) -> None:
    """As an agent zooms that sends its whole history."""
    data = png()
    crop = told(ask(server, dialect, inline(data), inline(cropped(data))))
    part = {"digest": digest(data), "region": BOX}
    assert told(ask(server, dialect, inline(data), part)) == crop


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_at_full_detail(server: Server, dialect: str) -> None:
    """By its digest alone, with other bounds."""
    data = png()
    id = upload(server, data)
    small, large = {"max_pixels": 64 * 64}, {"max_pixels": 128 * 192}
    seen = [
        told(ask(server, dialect, {"file_id": id, **small})),
        told(ask(server, dialect, {"digest": digest(data), **large})),
    ]
    sent = [told(ask(server, dialect, {**inline(data), **each})) for each in (small, large)]
    assert seen == sent
    assert seen[0][1] < seen[1][1]


HOSTILE = [
    ([0, 0, 193, 128], "192 x 128 px"),
    ([0, 0, 2**40, 2**40], "192 x 128 px"),
    ([-5, 0, 9, 9], "192 x 128 px"),
    ([9, 9, 9, 20], "192 x 128 px"),
    ([20, 20, 9, 9], "192 x 128 px"),
    ([0, 0, 10], "length"),
    ([0, 0, 1, 1, 1], "length"),
    ([], "length"),
    ([0, 0, 1.5, 1], "int"),
    ([0, 0, True, True], "int"),
    ([0, 0, "1", "1"], "int"),
    ([0, 0, None, 1], "int"),
    ([[0], 0, 1, 1], "int"),
    ("0,0,1,1", "array"),
    ({"x": 1}, "array"),
    (7, "array"),
    ([0, 0, 2**64, 1], "int"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_no_region_is_refused_by_its_name(server: Server, dialect: str) -> None:
    data = png()
    id = upload(server, data)
    before = counts(server)
    for region, why in HOSTILE:
        answer = ask(server, dialect, {"file_id": id, "region": region})
        assert answer.status_code == 400, (region, answer.text)
        error = answer.json()["error"]
        assert "region" in error["message"], (region, error)
        assert why in error["message"], (region, error)
    url = f"{server.url}/v1/{PATHS[dialect]}"
    asked = json.dumps(body(dialect, [{"file_id": id, "region": [0, 0, 1, 1]}], model="tiny"))
    broken = asked.replace("[0, 0, 1, 1]", "[0, 0, NaN, 1]")
    headers = {**WITH_KEY, "content-type": "application/json"}
    assert httpx.post(url, content=broken, headers=headers).status_code == 400
    assert counts(server) == before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_digest_that_was_not_sent_is_refused(server: Server, dialect: str) -> None:
    """Forged, bent, or of an image that came within another request."""
    data = png()
    told(ask(server, dialect, inline(data)))
    for name in (digest(data), "blake3-" + 64 * "0", "sha256-" + 64 * "f"):
        answer = ask(server, dialect, {"digest": name, "region": BOX})
        assert answer.status_code == 400
        assert f"with the digest {name}" in answer.text
        assert "unknown_digest" in answer.text
    for name in ("blake3-" + 63 * "0", "md5-" + 64 * "0", digest(data).upper(), "../" + 64 * "0"):
        answer = ask(server, dialect, {"digest": name})
        assert answer.status_code == 400
        assert "digest" in answer.json()["error"]["message"]


def test_bytes_that_came_by_name_are_known_to_their_tenant_alone(server: Server) -> None:
    """As `saccade proxy` sends them. Another salt is another tenant."""
    data, url = png(), f"{server.url}/v1/chat/completions"
    whole = body("chat", [inline(data)], model="tiny", cache_salt="one")
    named = NamedBody(json.dumps(whole).encode())
    sent = named.related(named.names)
    headers = {**WITH_KEY, "content-type": str(sent.content_type)}
    httpx.post(url, content=bytes(sent.body), headers=headers, timeout=60).raise_for_status()
    part = {"digest": digest(data), "region": BOX}
    crop = told(ask(server, "chat", inline(cropped(data)), cache_salt="one"))
    before = counts(server)
    assert told(ask(server, "chat", part, cache_salt="one")) == crop
    assert counts(server)[DECODES] == before[DECODES] + 1
    for salt in ("two", None):
        refused, never = (
            ask(server, "chat", {**part, "digest": name}, cache_salt=salt)
            for name in (digest(data), "blake3-" + 64 * "0")
        )
        assert refused.status_code == never.status_code == 400
        forged = refused.text.replace(digest(data), "blake3-" + 64 * "0")
        assert forged == never.text


def test_the_trace_says_which_part_is_shown(server: Server) -> None:
    data = png()
    held = {"file_id": upload(server, data)}
    traced = {"saccade": {"trace": True}}
    answer = ask(server, "chat", held, {**held, "region": BOX}, **traced)
    whole, part = answer.raise_for_status().json()["saccade"]["images"]
    assert "region" not in whole
    assert part["region"] == [*BOX]
    assert part["digest"] == whole["digest"] == digest(data).removeprefix("blake3-")
    assert part["size"] == {"width": 128, "height": 96}


def test_where_nothing_is_cut_a_region_is_refused(server: Server) -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    content = [{**video, "region": [0, 0, 9, 9]}]
    sent = {"messages": [{"role": "user", "content": content}]}
    refused = server.post("/v1/chat/completions", sent, status=400)
    assert "region" in refused["error"]["message"]


def test_a_zoom_may_name_the_screenshot_of_its_history(server: Server) -> None:
    """Its result equals the client's crop, and coordinates go on counting the screenshot."""
    data = png()

    def act(id: str, name: str, **action: Any) -> dict[str, Any]:
        block = {"type": "tool_use", "id": id, "name": name, "input": action}
        return {"role": "assistant", "content": [{**block, "toolset_name": "computer"}]}

    def result(id: str, *content: Any) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": id, "content": [*content]}
        return {"role": "user", "content": [block]}

    def turns(zoomed: dict[str, Any]) -> httpx.Response:
        done = {"type": "text", "text": "Done."}
        messages = [
            {
                "role": "user",
                "content": [_block(**inline(data)), {"type": "text", "text": "Look."}],
            },
            act("a", "zoom", region=[*BOX]),
            result("a", zoomed),
            act("b", "left_click", coordinate=[190, 127]),
            result("b", done),
            {"role": "user", "content": [zoomed, {"type": "text", "text": "And here?"}]},
            act("c", "left_click", coordinate=[190, 127]),
            result("c", done),
        ]
        sent = {"model": "tiny", "max_tokens": 8, "messages": messages, "temperature": 0}
        sent |= {"tools": [{"type": "computer_toolset_20260801"}]}
        return server.send("/v1/messages", sent)

    crop = turns(_block(**inline(cropped(data))))
    assert crop.status_code == 400, "a crop of the user's own is taken for a screenshot"
    for named in (digest(data), f"sha256-{hashlib.sha256(data).hexdigest()}"):
        answer = turns(_block(digest=named, region=BOX))
        assert answer.status_code == 200, answer.text
