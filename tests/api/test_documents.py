"""PDFs over HTTP: each way to send one is the same request, its pages are what the model sees, and
what is not read is refused by name.
"""

from __future__ import annotations

import base64
import io
import itertools
import re
import zipfile
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

from saccade.core.types import Request
from saccade.plugins import documents
from saccade_bench.fixtures.pdf import A4, Sheet, assembled, pdf
from tests.fixtures.tiny import picture
from tests.helpers.images import data_url
from tests.helpers.served import TOKENIZER, Served

PHOTO = picture(40, 60, 3)
PAGES = [Sheet(["the quick brown fox"]), Sheet(["two blue squares"], PHOTO), Sheet([], PHOTO)]
FILE = pdf(PAGES)
DATA = base64.b64encode(FILE).decode()
SMALL = 32 * 32 * 12
NUMBERS = itertools.count()


def fresh() -> bytes:
    """The same pages in a file that nobody has seen."""
    return FILE + f"%{next(NUMBERS)}\n".encode()


def counted(served: Served) -> tuple[float, float]:
    """Pages rendered, and documents opened."""
    value = served.front.metrics.value
    return value("saccade_pages_rendered_total"), value("saccade_documents_opened_total")


def upload(served: Served, data: bytes, name: str = "f.pdf") -> Any:
    files = {"file": (name, data)}
    return served.http.post("/v1/files", files=files, data={"purpose": "user_data"})


def chat(served: Served, *parts: dict[str, Any], **body: Any) -> Any:
    content = [{"type": "text", "text": "look: "}, *parts, {"type": "text", "text": "how many?"}]
    messages = [{"role": "user", "content": content}]
    limits = {"mm_processor_kwargs": {"max_pixels": SMALL}}
    return served.http.post(
        "/v1/chat/completions", json={"model": "demo", "messages": messages, **limits, **body}
    )


def file_part(data: bytes, **more: Any) -> dict[str, Any]:
    told = f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": "file", "file": {"file_data": told, **more}}


def shown(request: Request) -> tuple[object, ...]:
    return request.tokens, request.spans, request.images


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def text_of(request: Request) -> str:
    """Of a prompt; each image is one mark."""
    told = TOKENIZER.decode(list(request.tokens))
    return re.sub(r"Picture \d+: <\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>", "#", told)


def test_every_way_to_send_a_pdf_shows_each_pages_text_and_image(served: Served) -> None:
    new = fresh()
    data = base64.b64encode(new).decode()
    url = f"data:application/pdf;base64,{data}"
    id = upload(served, new).json()["id"]
    before = counted(served)
    for part in (
        {"type": "file", "file": {"file_data": url}},
        {"type": "file", "file": {"file_data": data}},
        {"type": "file", "file": {"file_id": id}},
    ):
        answer = chat(served, part)
        assert answer.status_code == 200, answer.text
    content = [
        {"type": "input_text", "text": "look: "},
        {"type": "input_file", "file_data": url},
        {"type": "input_text", "text": "how many?"},
    ]
    body = {"model": "demo", "input": [{"role": "user", "content": content}]}
    limits = {"mm_processor_kwargs": {"max_pixels": SMALL}}
    answer = served.http.post("/v1/responses", json={**body, **limits})
    assert answer.status_code == 200, answer.text
    first, *others = served.submitted
    assert all(shown(each) == shown(first) for each in others) and len(others) == 3
    text = text_of(first)
    assert (
        "look: Page 1 of 3\nthe quick brown fox\n#\n"
        "Page 2 of 3\ntwo blue squares\n#\nPage 3 of 3\n#how many?" in text
    )
    assert len(first.images) == 3 and len({image.key for image in first.images}) == 3
    rendered, opened = counted(served)
    assert (rendered - before[0], opened - before[1]) == (3, 4)


def test_a_page_is_the_image_that_was_drawn_whatever_file_it_is_in(served: Served) -> None:
    other = pdf([Sheet(["another beginning"]), PAGES[1], Sheet(["three"])])
    for data in (FILE, other):
        assert chat(served, file_part(data)).status_code == 200
    first, second = served.submitted
    assert first.images[1] == second.images[1]
    assert first.images[0] != second.images[0]
    assert first.images[2] != second.images[2]


def test_what_is_seen_of_pages_is_the_requests_wish(served: Served) -> None:
    seen = {}
    new, before = fresh(), counted(served)
    for view in ("text", "images", "both"):
        answer = chat(served, file_part(new), saccade={"documents": view})
        assert answer.status_code == 200, answer.text
        (*_, request) = served.submitted
        seen[view] = ("fox" in text_of(request), len(request.images))
    assert seen == {"text": (True, 0), "images": (False, 3), "both": (True, 3)}
    assert counted(served)[0] - before[0] == 3


def test_the_pages_that_are_named_are_those_of_the_whole_file(served: Served) -> None:
    new = fresh()
    upload_id = upload(served, new).json()["id"]
    part = {"type": "file", "file": {"file_id": upload_id}}
    before = counted(served)
    for pages in ([2], [3, 1], None):
        answer = chat(served, part, saccade={"pages": pages})
        assert answer.status_code == 200, answer.text
    one, two, whole = served.submitted
    assert counted(served)[0] - before[0] == 1 + 2 + 3
    assert "look: Page 2 of 3\ntwo blue squares\n#how many?" in text_of(one)
    told = "look: Page 3 of 3\n#\nPage 1 of 3\nthe quick brown fox\n#how many?"
    assert told in text_of(two)
    keys = [image.key for image in whole.images]
    assert [image.key for image in (*one.images, *two.images)] == [keys[1], keys[2], keys[0]]
    again = counted(served)
    assert chat(served, part, saccade={"pages": [3, 1]}).status_code == 200
    assert counted(served)[0] == again[0]


def test_every_dialect_names_pages_and_shows_them_bare(served: Served) -> None:
    """As OCR models are trained: an image, without its number, text, or the file's name."""
    small = pdf([Sheet([f"page {number}"], PHOTO, (128.0, 128.0), 12) for number in range(3)])
    new = base64.b64encode(small).decode()
    own = {"documents": "bare", "pages": [2]}
    source = {"type": "base64", "media_type": "application/pdf", "data": new}
    block = {"type": "document", "source": source, "title": "a title"}
    told = {"type": "input_file", "file_data": f"data:;base64,{new}", "filename": "f.pdf"}
    asked = {"type": "input_text", "text": "how many?"}
    http = served.http
    part = {"type": "file", "file": {"file_data": new, "filename": "f.pdf"}}
    assert chat(served, part, saccade=own).status_code == 200
    message = {"role": "user", "content": [block, {"type": "text", "text": "how many?"}]}
    body = {"model": "demo", "max_tokens": 9, "messages": [message], "saccade": own}
    assert http.post("/v1/messages", json=body).status_code == 200
    input = [{"role": "user", "content": [told, asked]}]
    body = {"model": "demo", "input": input, "saccade": own}
    assert http.post("/v1/responses", json=body).status_code == 200
    requests = served.submitted
    assert [len(each.images) for each in requests] == [1, 1, 1]
    texts = [text_of(each) for each in requests]
    assert "user\nlook: #how many?" in texts[0]
    assert all("user\n#how many?" in each for each in texts[1:])


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ([4], "page 4 was requested, but the PDF has 3 pages"),
        ([1, 2**31 - 1], "but the PDF has 3 pages"),
        ([0], "pages"),
        ([2**31], "pages"),
        ([], "pages"),
        ([1] * 1001, "pages"),
        (["1"], "pages"),
        ("1-2", "pages"),
        ([True], "pages"),
    ],
)
def test_a_page_that_is_not_there_is_refused_by_name(served: Served, pages: Any, said: str) -> None:
    before = counted(served)[0]
    error = refused(chat(served, file_part(FILE), saccade={"pages": pages}))
    assert said in error["message"] and not served.submitted
    assert counted(served)[0] == before


def test_detail_and_bounds_set_a_pages_pixels(served: Served) -> None:
    def pixels(size: tuple[float, float], **inside: Any) -> tuple[int, int]:
        data = pdf([Sheet(["x"], size=size)])
        messages = [{"role": "user", "content": [file_part(data, **inside)]}]
        answer = served.http.post(
            "/v1/chat/completions", json={"model": "demo", "messages": messages}
        )
        assert answer.status_code == 200, answer.text
        (*_, request) = served.submitted
        return request.images[0].canvas

    height, width = pixels(A4, max_pixels=SMALL)
    assert height * width <= SMALL and height > width
    small = (200.0, 150.0)
    usual, high = (pixels(small, detail=each) for each in ("auto", "high"))
    assert np.prod(usual) == pytest.approx(200 * 150 * 1.5**2, rel=0.15)
    assert np.prod(high) == pytest.approx(200 * 150 * 3**2, rel=0.15)
    low = pixels((1200.0, 900.0), detail="low")
    assert np.prod(low) == pytest.approx(512 * 512, rel=0.15) and np.prod(low) <= 512 * 512


def test_a_messages_document_is_the_same_and_carries_marks(served: Served) -> None:
    def ask(source: dict[str, Any], **more: Any) -> Any:
        block = {"type": "document", "source": source, **more}
        content = [block, {"type": "text", "text": "how many?"}]
        return served.http.post(
            "/v1/messages",
            json={
                "model": "demo",
                "max_tokens": 5,
                "messages": [{"role": "user", "content": content}],
                "saccade": {"documents": "text"},
            },
        )

    told = {"title": "Report", "context": "of the board"}
    id = upload(served, FILE).json()["id"]
    sources = [
        {"type": "base64", "media_type": "application/pdf", "data": DATA},
        {"type": "file", "file_id": id},
    ]
    for source in sources:
        answer = ask(source, **told, cache_control={"type": "ephemeral"})
        assert answer.status_code == 200, answer.text
    first, second = served.submitted
    assert shown(first) == shown(second)
    assert "Report\nof the board\nPage 1 of 3\nthe quick brown fox" in text_of(first)
    ((end, seconds),) = first.caching.breakpoints
    assert seconds == 300
    kept = TOKENIZER.decode(list(first.tokens[:end]))
    assert kept.rstrip().endswith("Page 3 of 3") and "how many" not in kept
    refusal = ask(sources[0], citations={"enabled": True})
    assert refusal.status_code == 400
    assert "citations" in refusal.json()["error"]["message"]
    assert ask(sources[0], citations={"enabled": False}).status_code == 200


def test_special_tokens_in_a_pdf_are_its_text(served: Served) -> None:
    data = pdf([Sheet(["<|im_end|>", "<|vision_start|>"])])
    assert chat(served, file_part(data), saccade={"documents": "text"}).status_code == 200
    (request,) = served.submitted
    (end,) = TOKENIZER.encode("<|im_end|>")
    plain = chat(served, {"type": "text", "text": "nothing"})
    assert plain.status_code == 200
    assert request.tokens.count(end) == served.submitted[1].tokens.count(end)


def test_an_image_may_still_come_as_a_file(served: Served) -> None:
    file = io.BytesIO()
    Image.fromarray(PHOTO).save(file, "PNG")
    url = data_url(file.getvalue())
    assert chat(served, file_part(file.getvalue())).status_code == 200
    assert chat(served, {"type": "image_url", "image_url": {"url": url}}).status_code == 200
    first, second = served.submitted
    assert shown(first) == shown(second)


def encrypted() -> bytes:
    key = f"/Filter /Standard /V 1 /R 2 /O <{'ab' * 32}> /U <{'cd' * 32}> /P -4"
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        3: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] >>",
        4: f"<< {key} >>".encode(),
    }
    return assembled(objects, f"/Encrypt 4 0 R /ID [<{'00' * 16}> <{'00' * 16}>]")


def office(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr(name, "<xml/>")
    return file.getvalue()


@pytest.fixture(scope="module")
def long_file() -> bytes:
    return pdf([Sheet([f"number {number}"]) for number in range(1, 312)])


def test_the_limit_counts_the_pages_that_are_asked_for(served: Served, long_file: bytes) -> None:
    sent = upload(served, long_file)
    assert sent.status_code == 200 and sent.json()["pages"] == 311
    part: dict[str, Any] = {"type": "file", "file": {"file_id": sent.json()["id"]}}
    bare = {"documents": "text", "pages": [311, 310]}
    for each in (part, file_part(long_file)):
        answer = chat(served, each, saccade=bare)
        assert answer.status_code == 200, answer.text
        assert "number 311" in text_of(served.submitted[-1])
    one = {**part, "file": {**part["file"], "page": 250}}
    assert chat(served, one).status_code == 200
    for asked in ({}, {"saccade": {"documents": "text", "pages": [*range(1, 202)]}}):
        error = refused(chat(served, part, **asked))
        assert error["code"] == "too_many_pages" and error["param"] == "messages[0].content[1]"
    beyond = refused(chat(served, part, saccade={"pages": [312]}))
    assert beyond["code"] == "no_such_page"


def test_a_file_of_more_pages_than_are_opened_is_refused(served: Served) -> None:
    page = b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    kids = b"3 0 R " * 12_000
    tree = b"2 0 obj<</Type/Pages/Count 12000/Kids[" + kids + b"]>>endobj\n"
    root = b"1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    data = b"%PDF-1.7\n" + root + tree + page + b"trailer<</Root 1 0 R>>\n%%EOF\n"
    for answer in (upload(served, data), chat(served, file_part(data), saccade={"pages": [5]})):
        error = refused(answer)
        assert error["code"] == "too_many_pages" and "12000 pages" in error["message"]


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (pdf([Sheet(["x"])] * 201), "too_many_pages", "201 pages; the limit is 200"),
        (encrypted(), "encrypted_document", "without one"),
        (FILE[:200], "invalid_document", "damaged or cut short"),
        (b"%PDF-1.7\n", "invalid_document", "damaged or cut short"),
        (office("word/document.xml"), "unsupported_document", "convert it to PDF"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "unsupported_document", "convert it to"),
        (b"{\\rtf1 hello}", "unsupported_document", "convert it to PDF"),
        (pdf([Sheet(["x"], size=(14400, 10))]), "invalid_image", "page 1 of the PDF is 10 x"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    served: Served, data: bytes, code: str, says: str
) -> None:
    error = refused(chat(served, file_part(data)))
    assert (error["code"], error["param"]) == (code, "messages[0].content[1]")
    assert says in error["message"]
    assert not served.submitted


def test_a_pdf_without_text_is_not_read_as_text(served: Served) -> None:
    error = refused(chat(served, file_part(pdf([Sheet([], PHOTO)])), saccade={"documents": "text"}))
    assert error["code"] == "no_text" and '"images"' in error["message"]


def test_an_upload_is_looked_at(served: Served) -> None:
    assert refused(upload(served, FILE[:200]))["code"] == "invalid_document"
    assert refused(upload(served, office("xl/workbook.xml")))["code"] == "unsupported_document"
    told = upload(served, fresh()).json()
    assert (told["pages"], told["page_sizes"]) == (3, [[595, 842]] * 3)
    turned = pdf([Sheet(["a"], size=(200.5, 300))]).replace(b"/Contents", b"/Rotate 90 /Contents")
    assert upload(served, turned).json()["page_sizes"] == [[200.5, 300]]
    image = io.BytesIO()
    Image.fromarray(PHOTO).save(image, "PNG")
    assert "pages" not in upload(served, image.getvalue(), "f.png").json()


def test_without_the_extra_its_name_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "renderer_version", lambda: "")
    error = refused(chat(served, file_part(FILE)))
    assert error["code"] == "no_document_reader" and "`documents`" in error["message"]


# ---- parts of pages

BOX = [30, 40, 230, 190]


def as_chat(source: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "file", "file": {**source, **options}}
    content = [part, {"type": "text", "text": "what?"}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}


def as_response(source: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "input_file", **source, **options}
    content = [part, {"type": "input_text", "text": "what?"}]
    return "/v1/responses", {"input": [{"role": "user", "content": content}]}


def as_block(source: dict[str, Any], **options: Any) -> dict[str, Any]:
    match source:
        case {"file_id": id}:
            given = {"type": "file", "file_id": id}
        case {"digest": name}:
            given = {"type": "digest", "digest": name}
        case {"file_data": data}:
            given = {"type": "base64", "media_type": "application/pdf", "data": data}
    return {"type": "document", "source": given, **options}


def as_message(source: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    content = [as_block(source, **options), {"type": "text", "text": "what?"}]
    return "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}


DIALECTS = [as_chat, as_response, as_message]


def ask_part(served: Served, dialect: Any, source: dict[str, Any], **options: Any) -> Any:
    path, body = dialect(source, **options)
    return served.http.post(path, json={"model": "demo", **body})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_shows_a_part_of_a_page(served: Served, dialect: Any) -> None:
    """By the file's id, its digest or its bytes. It is an image alone, drawn once."""
    new = fresh()
    id = upload(served, new).json()["id"]
    before = counted(served)[0]
    sources: list[dict[str, Any]] = [
        {"file_id": id},
        {"digest": f"blake3-{blake3(new).hexdigest()}"},
        {"file_data": base64.b64encode(new).decode()},
    ]
    for source in sources:
        answer = ask_part(served, dialect, source, page=2, region=BOX, max_pixels=SMALL)
        assert answer.status_code == 200, answer.text
    first, *others = served.submitted
    assert all(shown(each) == shown(first) for each in others)
    assert len(first.images) == 1 and counted(served)[0] == before + 1
    assert "user\n#what?" in text_of(first)
    height, width = first.images[0].canvas
    assert height * width <= SMALL and width > height


def test_a_part_of_a_page_is_the_same_in_every_dialect(served: Served) -> None:
    id = upload(served, fresh()).json()["id"]
    wanted: dict[str, Any] = {"page": 2, "region": BOX, "max_pixels": SMALL}
    for dialect in DIALECTS:
        answer = ask_part(served, dialect, {"file_id": id}, **wanted)
        assert answer.status_code == 200, answer.text
    beside: dict[str, Any] = {"type": "file", "file_id": id, **wanted}
    content = [beside, {"type": "text", "text": "what?"}]
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    named = {"type": "image_file", "image_file": {"file_id": id, **wanted}}
    body = {"model": "demo", "messages": [{"role": "user", "content": [named, content[1]]}]}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    part = as_block({"file_id": id}, **wanted)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    turns: list[Any] = [("user", "Go."), ("assistant", [call]), ("user", [result])]
    messages = [{"role": role, "content": each} for role, each in turns]
    body = {"model": "demo", "max_tokens": 5, "messages": messages}
    assert served.http.post("/v1/messages", json=body).status_code == 200
    requests = served.submitted
    assert len(requests) == 6
    assert len({each.images for each in requests}) == 1


def test_one_page_may_be_named_by_its_part(served: Served) -> None:
    """As `saccade.pages` does for all files of a request."""
    new = fresh()
    assert chat(served, file_part(new, page=2)).status_code == 200
    assert chat(served, file_part(new), saccade={"pages": [2]}).status_code == 200
    assert chat(served, file_part(new, page=3), saccade={"pages": [2]}).status_code == 200
    assert chat(served, file_part(new), saccade={"pages": [3]}).status_code == 200
    one, same, other, there = served.submitted
    assert shown(one) == shown(same) and shown(other) == shown(there) and shown(one) != shown(other)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_no_part_of_a_page_is_refused_by_its_name(served: Served, dialect: Any) -> None:
    id = upload(served, fresh()).json()["id"]
    before = counted(served)[0]
    for options, field, said in (
        ({"page": 1, "region": [0, 0, 596, 9]}, "region", "595 x 842 points"),
        ({"page": 1, "region": [0, 0, 2**40, 2**40]}, "region", "595 x 842 points"),
        ({"page": 1, "region": [0, 0, 1.5, 1]}, "region", "int"),
        ({"page": 1, "region": [0, 0, 1]}, "region", "length"),
        ({"region": BOX}, "region", "3 pages"),
        ({"page": 4, "region": BOX}, "", "page 4 was requested"),
        ({"page": 0}, "page", "1"),
        ({"page": "2"}, "page", "int"),
        ({"page": True}, "page", "int"),
        ({"page": 2**40}, "page", ""),
        ({"page": 1, "region": BOX, "max_pixels": 1}, "", "max_pixels"),
        ({"page": 1, "region": [0, 0, 1, 842]}, "region", "aspect ratio"),
    ):
        answer = ask_part(served, dialect, {"file_id": id}, **options)
        assert answer.status_code == 400, (options, answer.text)
        message = answer.json()["error"]["message"]
        assert field in message and said in message, (options, message)
    assert counted(served)[0] == before and not served.submitted
    for neutral in ({"page": None, "region": None}, {"page": 1, "region": None}):
        answer = ask_part(served, dialect, {"file_id": id}, **neutral, max_pixels=SMALL)
        assert answer.status_code == 200, answer.text
