"""The Files API through the real openai SDK, and uploaded pictures in messages."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from saccade.core.config import MIB
from saccade.core.options import ServerOptions
from saccade.ipc.messages import Submit
from saccade.plugins.files.uploads import uploads_of
from tests.helpers.echo import CONTEXT
from tests.helpers.images import png
from tests.helpers.served import Served, serving


@pytest.fixture(autouse=True)
def empty(served: Served) -> Iterator[None]:
    yield
    for file in served.openai.files.list():
        served.openai.files.delete(file.id)


def test_the_sdk_uploads_retrieves_reads_and_deletes(served: Served) -> None:
    files, data = served.openai.files, png("red")
    made = files.create(file=("cat.png", data), purpose="vision")
    assert (made.object, made.filename, made.purpose, made.bytes) == (
        "file",
        "cat.png",
        "vision",
        len(data),
    )
    assert made.status == "processed" and made.expires_at is None
    assert files.retrieve(made.id) == made
    assert files.content(made.id).read() == data
    deleted = files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "file_not_found"


@pytest.mark.more
def test_the_sdk_lists_page_by_page_in_either_order_and_by_purpose(served: Served) -> None:
    files = served.openai.files
    made = [
        files.create(file=(f"{n}.png", png("red", (32 + n, 32))), purpose="vision").id
        for n in range(5)
    ]
    other = files.create(file=("x.jsonl", b"{}\n"), purpose="evals").id
    assert [file.id for file in files.list()] == [other, *made[::-1]]
    assert [file.id for file in files.list(order="asc", limit=2)] == [
        *made,
        other,
    ]  # the SDK asks for page after page
    page = files.list(order="asc", limit=2, after=made[1])
    assert [file.id for file in page.data] == made[2:4] and page.has_more
    assert [file.id for file in files.list(purpose="evals")] == [other]
    assert files.list(purpose="assistants").data == []


def test_malformed_forms_are_answered_and_not_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for form in (b"--x!\r\n\r\n--x--\r\n", b"--x\r\n\xcb: y\r\n\r\n\r\n--x--\r\n"):
        answer = served.http.post("/v1/files", content=form, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_multipart"
    assert caplog.records == []


def test_files_may_expire(served: Served) -> None:
    after: Any = {"anchor": "created_at", "seconds": 7200}
    made = served.openai.files.create(
        file=("cat.png", png("red")), purpose="vision", expires_after=after
    )
    assert made.expires_at == made.created_at + 7200


def test_data_is_kept_as_it_comes_and_pictures_must_be_pictures(served: Served) -> None:
    files = served.openai.files
    html = b"<!doctype html><html></html>"
    kept = files.create(file=("x.jsonl", html), purpose="fine-tune")
    response = files.content(kept.id)
    assert response.read() == html
    assert response.response.headers["content-type"] == "application/octet-stream"
    assert response.response.headers["x-content-type-options"] == "nosniff"
    for data, reason in (
        (html, "an HTML page"),
        (b"", "empty"),
        (png("red")[:20], "damaged or cut short"),
        (b"hi", "is text"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            files.create(file=("cat.png", data), purpose="vision")
        assert caught.value.param == "file" and reason in caught.value.message
    assert len(files.list().data) == 1


def multipart(
    served: Served, files: dict[str, Any] | None = None, query: str = "", **fields: str
) -> tuple[int, dict[str, Any]]:
    response = served.http.post(
        "/v1/files" + query, data=fields, files=files or {"other": ("x", b"")}
    )
    return response.status_code, response.json()["error"]


def test_what_an_upload_lacks_or_has_too_much_is_named(served: Served) -> None:
    file = {"file": ("cat.png", png("red"))}
    for fields, param in (
        ({}, "purpose"),
        ({"purpose": "fun"}, "purpose"),
        ({"purpose": "vision", "colour": "red"}, "colour"),
        ({"purpose": "vision", "expires_after[seconds]": "7200"}, "expires_after"),
        (
            {
                "purpose": "vision",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "7",
            },
            "expires_after",
        ),
    ):
        status, error = multipart(served, file, **fields)
        assert (status, error["param"]) == (400, param)
    assert multipart(served, {"other": ("x", b"")}, purpose="vision")[1]["param"] == "other"
    wrong = served.http.post("/v1/files", json={"purpose": "vision"})
    assert wrong.status_code == 400 and "multipart/form-data" in wrong.json()["error"]["message"]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    broken = served.http.post("/v1/files", content=b"no boundary here", headers=headers)
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_multipart"
    for query in ("?limit=0", "?limit=x", "?order=up", "?after=file-x"):
        assert (
            served.http.get("/v1/files" + query).json()["error"]["param"]
            == query[1:].partition("=")[0]
        )


@pytest.mark.first
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"warm": "{"}, "warm"),
        ({"warm": "[]"}, "warm"),
        ({"warm": '{"max_pixels": 0}'}, "warm.max_pixels"),
        ({"warm[max_pixels]": "many"}, "warm.max_pixels"),
        ({"warm[pixels]": "5"}, "warm.pixels"),
        ({"saccade": "{}"}, "saccade.warm"),
        ({"saccade": '{"warm": {"detail": "most"}}'}, "saccade.warm.detail"),
        ({"saccade[warm][max_pixels]": "-1"}, "saccade.warm.max_pixels"),
        ({"warm": "{}", "saccade": '{"warm": {}}'}, "warm"),
        ({"warm": '{"prefix": [{"role": "nobody"}]}'}, "warm.prefix[0].role"),
        ({"warm[prefix][][role]": "user"}, "warm.prefix[0].content"),
        ({"warm[prefix][][role]": "user", "warm[prefix][][content][][text]": "a"}, "warm"),
        ({"warm[prefix]": "["}, "warm"),
        ({"warm": '{"prefix": [' + "{}," * CONTEXT + "{}]}"}, "warm.prefix"),
        ({"warm": json.dumps({"cache_salt": "x" * 2**19})}, "warm"),
        ({"warm": "{}", "purpose": "batch"}, "warm"),
    ],
)
def test_what_is_wrong_with_warm_is_named_and_nothing_is_kept(
    served: Served, fields: dict[str, str], param: str
) -> None:
    file = {"file": ("a.png", png("red"))}
    status, error = multipart(served, file, **{"purpose": "vision", **fields})
    assert (status, error["param"]) == (400, param), error
    assert not served.openai.files.list().data


def test_uploads_that_wait_to_be_got_ready_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused, and kept nowhere."""
    monkeypatch.setattr("saccade.plugins.files.warm_ups.MOST", 0)
    with pytest.raises(openai.RateLimitError) as caught:
        served.openai.files.create(
            file=("a.png", png("red")), purpose="vision", extra_body={"warm": {"max_pixels": 4096}}
        )
    assert "limit is 0" in caught.value.message and not served.openai.files.list().data


def test_an_upload_has_the_limits_of_a_picture_and_of_the_disk(served: Served) -> None:
    files = served.openai.files
    with pytest.raises(openai.APIStatusError, match="--tune max_image_bytes") as caught:
        files.create(file=("cat.png", png("red") + bytes(600_000)), purpose="vision")
    assert caught.value.status_code == 413
    files.create(file=("a.jsonl", bytes(MIB - 16_000)), purpose="evals")
    with pytest.raises(openai.APIStatusError, match="--files-dir FOLDER:SIZE") as caught:
        files.create(file=("cat.png", png("red")), purpose="vision")
    assert (caught.value.status_code, caught.value.code) == (413, "file_storage_full")


DIGITS = "9" * 5000


@pytest.mark.parametrize("limit", ["²", "٣", DIGITS, "-1", "1_0", " 1", "10001", ""])
def test_what_is_no_number_of_files_is_refused_by_name(served: Served, limit: str) -> None:
    response = served.http.get("/v1/files", params={"limit": limit})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
    assert len(response.content) < 300


@pytest.mark.parametrize("seconds", [DIGITS, "²", "3599", "1e4", ""])
def test_what_is_no_time_to_expire_is_refused_by_name(served: Served, seconds: str) -> None:
    fields = {
        "purpose": "vision",
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": seconds,
    }
    status, error = multipart(served, {"file": ("cat.png", png("red"))}, **fields)
    assert (status, error["param"]) == (400, "expires_after")


def test_a_name_without_end_is_refused(served: Served) -> None:
    status, error = multipart(served, {"file": ("n" * 1000, png("red"))}, purpose="vision")
    assert (status, error["param"]) == (400, "file") and "255" in error["message"]


def test_an_upload_that_the_temporary_directory_does_not_take_is_a_507(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"file": ("x", bytes(2 * MIB))}  # beyond what is received in memory
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    status, error = multipart(served, large, purpose="evals")
    assert (status, error["code"]) == (507, "insufficient_storage")
    assert "TMPDIR" in error["message"] and "No such file" in error["message"]
    assert multipart(served, {"file": ("x", b"x")}, purpose="fun")[0] == 400  # it serves on


def test_an_upload_that_the_disk_does_not_take_is_a_507(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's answer is put in the operating system's mouth."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        status, error = multipart(served, {"file": ("c.png", png("red"))}, purpose="vision")
    assert (status, error["code"]) == (507, "insufficient_storage")
    assert "--files-dir" in error["message"] and "No space left" in error["message"]
    assert served.openai.files.list().data == []
    served.openai.files.create(file=("cat.png", png("red")), purpose="vision")


def test_files_are_counted_before_they_are_read_and_once_however_often_named() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",), max_inflight_mb=1, max_body_mb=1)
    with serving(options) as narrow:
        file = io.BytesIO()
        Image.effect_noise((640, 640), 99).save(file, "PNG", compress_level=0)
        first = narrow.openai.files.create(file=("a.png", file.getvalue()), purpose="vision")
        assert first.bytes > 400_000
        part = {"type": "image_file", "image_file": {"file_id": first.id, "max_pixels": 8192}}
        ask(narrow, *[part] * 8)
        messages = [{"role": "user", "content": [part] * 64}]
        many = narrow.http.post(
            "/v1/chat/completions", json={"model": "demo", "messages": messages}
        )
        assert many.status_code == 400  # too many tokens: it was let in, and the file read once
        assert many.json()["error"]["code"] == "context_length_exceeded"
        uploads_of(narrow.front.intake.media)._store.budget = 8 * MIB
        others = []
        for n in range(2):
            Image.effect_noise((640, 641 + n), 99).save(
                (other := io.BytesIO()), "PNG", compress_level=0
            )
            made = narrow.openai.files.create(file=("b.png", other.getvalue()), purpose="vision")
            others.append({"type": "image_file", "image_file": {"file_id": made.id}})
        with pytest.raises(openai.APIStatusError, match="--max-inflight-mb") as caught:
            ask(narrow, part, *others)
        assert caught.value.status_code == 413
        assert narrow.front.metrics.value("saccade_request_bytes_buffered") == 0


def keys(served: Served) -> list[Any]:
    return [
        image.key
        for message in served.engine.received
        if isinstance(message, Submit)
        for image in message.request.images
    ]


def ask(served: Served, *parts: dict[str, Any]) -> None:
    served.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": list(parts)}]
    )


def test_both_ways_to_name_a_file_in_a_message_mean_its_bytes(served: Served) -> None:
    id = served.openai.files.create(file=("cat.png", png("blue", (300, 200))), purpose="vision").id
    ask(
        served,
        {"type": "file", "file": {"file_id": id}},
        {"type": "image_file", "image_file": {"file_id": id, "detail": "high"}},
    )
    small = {"type": "image_file", "image_file": {"file_id": id, "max_pixels": 8192}}
    ask(served, small, {"type": "file", "file": {"file_id": id}, "max_pixels": 8192})
    first, second, third, fourth = keys(served)
    assert first == second != third == fourth
    assert first.digest == third.digest


def test_a_file_that_is_gone_is_named_by_its_place(served: Served) -> None:
    id = served.openai.files.create(file=("cat.png", png("blue")), purpose="vision").id
    served.openai.files.delete(id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(
            served,
            {"type": "text", "text": "see"},
            {"type": "image_file", "image_file": {"file_id": id}},
        )
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1]", "file_not_found")


def test_a_file_that_is_no_picture_is_refused_in_a_message(served: Served) -> None:
    id = served.openai.files.create(file=("x.jsonl", b"{}"), purpose="evals").id
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, {"type": "image_file", "image_file": {"file_id": id}})
    assert caught.value.param == "messages[0].content[0]"


def test_the_key_guards_files_too() -> None:
    with serving(ServerOptions(port=0, served_model_name=("demo",), api_key="secret")) as locked:
        assert locked.http.get("/v1/files").status_code == 401
        assert locked.openai.files.list().data == []
