"""The page's files, what they may do, and the state that they show."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.plugins.documents import has_renderer
from saccade.plugins.page.handlers import FILES, WEB
from saccade.plugins.page.options import PageOptions
from tests.helpers.served import Served, serving

ROOT = Path(__file__).parents[3]
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.more
def test_the_page_is_made_of_its_own_files_only(served: Served) -> None:
    index = served.http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    named = {f"/{path}" for path in re.findall(r'(?:src|href)="(page/[^"]*)"', index.text)}
    seen = {"/"}
    while named - seen:
        path = (named - seen).pop()
        seen.add(path)
        text = served.http.get(path).raise_for_status().text
        if "/vendor/" in path:
            continue
        named |= {
            f"/page/{name}" for name in re.findall(r'(?:from |import |import\()"\./([^"]*)"', text)
        }
        for address in re.findall(r"https?://[^\"'` ]*", text):
            assert address == "http://www.w3.org/2000/svg"
    assert seen == FILES.keys()


@pytest.mark.more
def test_nothing_of_the_page_may_fetch_from_elsewhere_or_run_text(served: Served) -> None:
    for path in FILES:
        answer = served.http.get(path)
        policy = dict(
            each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["media-src"] == "blob:", "files of the user's own"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "dompurify", "only the sanitiser may make HTML"
        assert answer.headers["x-content-type-options"] == "nosniff"
        if "/vendor/" in path:
            continue
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in answer.text, f"{path}: {way}"
    index = served.http.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", index)


def test_an_unchanged_file_is_not_sent_again(served: Served) -> None:
    tag = served.http.get("/page/main.js").headers["etag"]
    again = served.http.get("/page/main.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert served.http.get("/page/main.js", headers={"if-none-match": '"x"'}).status_code == 200


def test_the_page_is_in_the_wheel() -> None:
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = data["tool"]["setuptools"]["package-data"]["saccade"]
    packed = {path for pattern in patterns for path in (ROOT / "saccade").glob(pattern)}
    assert {path for path in WEB.rglob("*") if path.is_file()} <= packed


def test_the_libraries_are_as_their_authors_published_them() -> None:
    recorded = json.loads((WEB / "vendor" / "vendor.json").read_bytes())
    libraries = {path.name: path for path in (WEB / "vendor").glob("*.*js")}
    assert set(libraries) == set(recorded)
    for name, path in libraries.items():
        data = path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == recorded[name]["sha256"], name
        assert recorded[name]["version"].encode() in data, name
        assert (WEB / "vendor" / f"{name.split('.')[0]}.LICENSE").stat().st_size > 1000


@pytest.mark.more
def test_a_server_without_the_page_answers_as_before() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",))
    with serving(options, extras=(PageOptions(disable_page=True),)) as served:
        for path in FILES:
            answer = served.http.get(path)
            assert answer.status_code == 404
            told = f"there is no {path}; there is the API reference at /docs"
            assert answer.json()["error"]["message"] == told
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/saccade/state").status_code == 200


def test_the_state_tells_what_is_on_its_way(served: Served) -> None:
    state = served.http.get("/saccade/state").json()
    assert (state["status"], state["model"], state["answers"]) == ("ready", "demo", [])
    assert state["kv_tokens"] == 4 * state["context_length"]
    assert {"images", "frames"} <= set(state["takes"])
    assert ("pdfs" in state["takes"]) == has_renderer()
    served.engine.paused = True
    try:
        stream = served.openai.chat.completions.create(model="demo", messages=HI, stream=True)
        next(iter(stream))
        (answer,) = served.http.get("/saccade/state").json()["answers"]
        assert answer["prompt_tokens"] > 1 and answer["generated"] >= 1
        assert (answer["images"], answer["seconds"] >= 0) == (0, True)
    finally:
        served.engine.paused = False
    assert list(stream)
    assert served.http.get("/saccade/state").json()["answers"] == []


# ---- keys


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with an operator's key and two others."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann:key-of-ann\nbob:key-of-bob\n")
    options = ServerOptions(port=0, served_model_name=("demo",), api_key="operator")
    with serving(options, extras=(KeySettings(str(keys)),)) as served:
        yield served


def get(served: Served, path: str, key: str | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return served.http.get(path, headers=headers)


@pytest.mark.more
def test_the_page_answers_without_a_key_and_the_state_does_not(keyed: Served) -> None:
    for path in FILES:
        assert get(keyed, path, None).status_code == 200
    for path in ("/saccade/state", "/metrics"):
        assert get(keyed, path, None).status_code == 401
        assert get(keyed, path, "wrong").status_code == 401
        assert get(keyed, path, "key-of-ann").status_code == 200


def test_one_of_several_keys_sees_only_its_own_answers(keyed: Served) -> None:
    def ask(key: str) -> Any:
        client = keyed.openai.with_options(api_key=key)
        stream = client.chat.completions.create(model="demo", messages=HI, stream=True)
        next(iter(stream))
        return stream

    keyed.engine.paused = True
    try:
        streams = [ask("key-of-ann"), ask("key-of-ann"), ask("key-of-bob")]
        shown = {
            key: len(get(keyed, "/saccade/state", key).json()["answers"])
            for key in ("key-of-ann", "key-of-bob", "operator")
        }
    finally:
        keyed.engine.paused = False
    assert shown == {"key-of-ann": 2, "key-of-bob": 1, "operator": 3}
    for stream in streams:
        assert list(stream)
