"""Several keys: each sees its own files, finds its own pictures cached, and leaves room for the
others. With one key or none, all are alike.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from saccade.core.client import Client
from saccade.core.config import MIB
from saccade.core.errors import ConfigError
from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.edge import auth as tenant
from saccade.edge.auth import Keys, read_keys
from saccade.edge.headers import client_of
from tests.helpers.asking import eventually, in_flight
from tests.helpers.images import data_url
from tests.helpers.served import Served, serving

NAME = ("demo",)
KEYS = """
# who: key
anna:key-a
ben   key-b
"""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    return str(path)


@pytest.fixture(scope="module")
def shared(keys_file: str) -> Iterator[Served]:
    """A server of two named keys and an old one without a name."""
    options = ServerOptions(
        port=0,
        served_model_name=NAME,
        api_key="old",
        max_queued_requests=4,
        max_inflight_mb=4,
        max_body_mb=4,
    )
    with serving(options, extras=(KeySettings(keys_file),)) as served:
        yield served


@pytest.fixture
def keyed(shared: Served) -> Iterator[dict[str, openai.OpenAI]]:
    """A client for each key."""
    with ExitStack() as stack:
        yield {
            key: stack.enter_context(
                openai.OpenAI(
                    base_url=f"{shared.address}/v1", api_key=key, max_retries=0, timeout=30
                )
            )
            for key in ("key-a", "key-b", "old")
        }


def png(size: int = 64) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((size, size), 99).convert("RGB").save(file, "PNG")
    return file.getvalue()


def part(data: bytes) -> dict[str, Any]:
    url = data_url(data)
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: openai.OpenAI, *parts: dict[str, Any], **extra: Any) -> None:
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "see"}]}]
    client.chat.completions.create(model="demo", messages=messages, extra_body=extra)


def test_a_key_fills_its_share_of_the_disk_and_no_more(keyed: dict[str, openai.OpenAI]) -> None:
    """Of one MiB."""
    anna, ben = keyed["key-a"], keyed["key-b"]
    kept = [anna.files.create(file=("a", bytes([n]) * 200_000), purpose="evals") for n in range(2)]
    with pytest.raises(
        openai.APIStatusError, match="the limit for one of several keys is 50%"
    ) as caught:
        anna.files.create(file=("a", bytes([9]) * 200_000), purpose="evals")
    assert (caught.value.status_code, caught.value.code) == (413, "file_storage_full")
    yours = ben.files.create(file=("b", bytes([9]) * 200_000), purpose="evals")
    for file in kept:
        anna.files.delete(file.id)
    assert anna.files.create(file=("a", bytes([9]) * 200_000), purpose="evals").id != yours.id
    for client in (anna, ben):
        for file in client.files.list():
            client.files.delete(file.id)


def test_each_key_sees_its_own_files_only(keyed: dict[str, openai.OpenAI]) -> None:
    anna, ben, old = keyed.values()
    data = png()
    mine = anna.files.create(file=("mine.png", data), purpose="vision")
    yours = ben.files.create(file=("yours.png", data), purpose="vision")
    assert [file.id for file in anna.files.list()] == [mine.id]
    assert [file.id for file in ben.files.list()] == [yours.id]
    assert old.files.list().data == []
    image: Any = {"type": "image_file", "image_file": {"file_id": mine.id}}
    for stranger in (ben, old):
        for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(mine.id)
        with pytest.raises(openai.NotFoundError) as caught:
            ask(stranger, image)
        assert caught.value.param == "messages[0].content[0]"
    ask(anna, image)
    anna.files.delete(mine.id)
    assert ben.files.content(yours.id).read() == data, "equal bytes stay for who else has them"
    ben.files.delete(yours.id)


def test_each_key_has_its_own_cache(shared: Served, keyed: dict[str, openai.OpenAI]) -> None:
    shared.engine.received.clear()
    image = part(png())
    for key, extra in (
        ("key-a", {}),
        ("key-b", {}),
        ("old", {}),
        ("key-a", {"cache_salt": "s"}),
        ("key-b", {"cache_salt": "s"}),
        ("old", {"cache_salt": "s"}),
    ):
        ask(keyed[key], image, **extra)
    ask(keyed["key-a"])
    salts = [request.cache_salt for request in shared.submitted]
    assert [request.images[0].key.salt for request in shared.submitted[:-1]] == salts[:-1]
    assert len(set(salts)) == 6 and salts[0] == salts[6] and salts[2] == ""
    assert {len(salt) for salt in salts if salt} == {32}
    shares = [request.client for request in shared.submitted]
    assert shares[0] == shares[3] == "key anna" and shares[1] == "key ben"
    assert shares[2] == "127.0.0.1" and shares[5] == f"salt {salts[5]}"


def test_a_cache_may_be_shared_where_files_are_not(keys_file: str) -> None:
    keys = Keys(None, KeySettings(keys_file, share_cache=True))
    anna, ben = (keys.client(scope(key)) for key in ("key-a", "key-b"))
    assert anna is not None and ben is not None
    assert anna.salt("") == ben.salt("") == "" and anna.salt("s") == ben.salt("s") != ""
    assert (anna.name, ben.name) == ("anna", "ben") and anna.share("") != ben.share("")


def announce(served: Served, key: str, nbytes: int) -> socket.socket:
    """A client that has announced a body and sent all but its last byte."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {nbytes}\r\n\r\n"
    )
    connection.sendall(head.encode() + b" " * (nbytes - 1))
    return connection


def status(served: Served, key: str, nbytes: int = 2) -> tuple[int, str]:
    response = httpx.post(
        f"{served.address}/v1/chat/completions",
        content=b" " * (nbytes - 2) + b"{}",
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    return response.status_code, response.json()["error"]["message"]


def test_one_key_takes_half_of_the_permits_at_most(
    shared: Served, keyed: dict[str, openai.OpenAI]
) -> None:
    shared.engine.paused = True
    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, keyed["key-a"]) for _ in range(2)]
        eventually(lambda: in_flight(shared) == 2)
        code, message = status(shared, "key-a")
        assert code == 429 and "of this API key" in message
        assert status(shared, "key-b")[0] == status(shared, "old")[0] == 400
        shared.engine.paused = False
        for each in asking:
            each.result(30)
    eventually(lambda: in_flight(shared) == 0)
    assert status(shared, "key-a")[0] == 400


def test_one_key_takes_half_of_the_bytes_at_most(shared: Served) -> None:
    with announce(shared, "key-a", MIB):
        eventually(lambda: shared.front.metrics.value("saccade_request_bytes_buffered") >= MIB - 1)
        code, message = status(shared, "key-a", MIB + MIB // 2)
        assert code == 429 and "of this API key" in message
        assert status(shared, "key-b", MIB + MIB // 2)[0] == 400
    eventually(lambda: shared.front.metrics.value("saccade_request_bytes_buffered") == 0)


def scope(key: str, address: str = "10.0.0.1", scheme: str = "Bearer") -> dict[str, Any]:
    return {
        "type": "http",
        "headers": [(b"authorization", f"{scheme} {key}".encode())],
        "client": (address, 1234),
    }


def test_a_key_is_one_of_the_keys_whatever_stands_around_it(keys_file: str) -> None:
    keys = Keys(None, KeySettings(keys_file))
    for right in (scope("key-a"), scope("key-a", scheme="bearer"), scope(" key-a ")):
        found = keys.client(right)
        assert found == Client("anna", "10.0.0.1", False, True)
    for wrong in ("key", "key-aa", "anna", "anna:key-a", "", "key-a key-b"):
        assert keys.client(scope(wrong)) is None
    assert keys.client(scope("key-a", scheme="Basic")) is None
    assert keys.client({"headers": [], "client": None}) is None


def test_a_file_of_keys_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "keys"
    path.write_text("\ufeffanna:key-a\nben:key-b\n", encoding="utf-8")
    keys = Keys(None, KeySettings(str(path)))
    assert keys.client(scope("key-a")) and not keys.client(scope("key-new"))
    path.write_text("anna:key-new\nben:key-b\ncleo:key-c\n")
    assert keys.client(scope("key-a")), "it is looked at once a second at most"
    now[0] += tenant.CHECK_SECONDS
    found = keys.client(scope("key-new"))
    assert found == Client("anna", "10.0.0.1", False, True)
    assert not keys.client(scope("key-a")) and keys.client(scope("key-c"))
    for spoil in (lambda: path.write_text("anna"), path.unlink):
        spoil()
        now[0] += tenant.CHECK_SECONDS
        caplog.clear()
        assert keys.client(scope("key-new")) and "the keys are unchanged" in caplog.text
        caplog.clear()
        assert keys.client(scope("key-new")) and not caplog.text, "it is said once"
    path.write_text("anna:key-d")
    now[0] += tenant.CHECK_SECONDS
    assert keys.client(scope("key-d")) == Client("anna", "10.0.0.1")


def test_a_key_keeps_its_cache_and_files_while_others_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("anna:key-a\n")
    options = ServerOptions(port=0, served_model_name=NAME)
    with serving(options, extras=(KeySettings(str(path)),)) as served, ExitStack() as stack:
        anna, ben = (
            stack.enter_context(
                openai.OpenAI(base_url=f"{served.address}/v1", api_key=key, max_retries=0)
            )
            for key in ("key-a", "key-b")
        )
        file = anna.files.create(file=("a.png", png(), "image/png"), purpose="vision")
        for keys in ("anna:key-a\n", "anna:key-a\nben:key-b\n", "anna:key-a\n\n"):
            path.write_text(keys)
            time.sleep(tenant.CHECK_SECONDS)
            ask(anna)
            assert anna.files.retrieve(file.id).id == file.id
            if "ben" in keys:
                ask(ben)
                with pytest.raises(openai.NotFoundError):
                    ben.files.retrieve(file.id)
        salts = [request.cache_salt for request in served.submitted]
    assert salts[0] == salts[1] == salts[3] != salts[2]
    assert all(salts)


def test_a_file_of_keys_in_utf_16_is_refused_by_that_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("anna:key-a", encoding="utf-16")
    with pytest.raises(ConfigError, match="is not encoded as UTF-8"):
        read_keys(path)


def test_a_key_may_come_in_any_of_the_usual_headers(keys_file: str) -> None:
    keys = Keys(None, KeySettings(keys_file))
    for name in (b"x-api-key", b"api-key"):
        assert keys.client({"headers": [(name, b"key-a")], "client": None}), name
    assert not keys.client({"headers": [(b"api-key", b"key-x")], "client": None})


def test_with_one_key_or_none_clients_are_told_apart_by_their_address(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("anna:key-a\n")
    for keys, key, name in (
        (Keys("k"), "k", ""),
        (Keys(None, KeySettings(str(path))), "key-a", "anna"),
    ):
        found = keys.client(scope(key))
        assert found == Client(name, "10.0.0.1")
        assert found.share("") == "10.0.0.1", "whose turns are by address"
        assert (found.salt("") == "") == (name == "")
    assert len(Keys(None)) == 0
    assert client_of({"client": ("2001:db8::1", 1)}).address == "2001:db8::/64"
    assert client_of({}).share("") == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it contains no keys"),
        ("anna", "line 1: expected name:key"),
        ("anna:", "line 1: expected"),
        ("# x\n\nanna:a\nanna:b", "line 4: the name anna is used twice"),
        ("anna:a\nben:a", "line 2: the name ben is used twice"),
        ("an na:a b", "line 1: expected"),
    ],
)
def test_a_file_of_keys_that_will_not_do_is_refused_by_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "missing")


def test_a_key_with_a_colon_in_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("anna:a:b\nben b:c\n")
    assert read_keys(path) == {"a:b": "anna", "b:c": "ben"}


def test_one_of_several_keys_flushes_nobodys_caches(shared: Served) -> None:
    for path in ("/flush_cache", "/reset_prefix_cache"):
        for key, status in (("key-a", 401), ("key-b", 401), ("old", 200)):
            answer = shared.http.post(path, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, (path, key)


def test_one_of_several_keys_changes_nobodys_adapters(shared: Served) -> None:
    for path in ("load", "unload"):
        for key, status in (("key-a", 401), ("key-b", 401), ("old", 400)):
            allowed = {"Authorization": f"Bearer {key}"}
            answer = shared.http.post(f"/v1/{path}_lora_adapter", headers=allowed, json={})
            assert answer.status_code == status, (path, key)


def test_whoever_reaches_an_open_server_changes_no_adapters() -> None:
    with serving(ServerOptions(host="0.0.0.0", port=0, served_model_name=("demo",))) as served:
        for path in ("load", "unload"):
            answer = served.http.post(f"/v1/{path}_lora_adapter", json={})
            assert answer.status_code == 401
            assert "--api-key" in answer.json()["error"]["message"]
