"""Bodies that name bytes: the server reads what the client would have sent, and nobody learns by a
name what another has sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from saccade.core.client import Client
from saccade.core.errors import InvalidRequest, UnknownDigests
from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.edge import related
from saccade.edge.related import RelatedBody, boundary_of, first_part, name_at_end
from saccade.edge.sent_bytes import KEPT_SECONDS, OVERHEAD, SentBytes
from saccade.plugins.route.affinity import bearing_of_body
from tests.helpers.images import data_url, png
from tests.helpers.served import Served, routed, serving

BOUNDARY = "0123456789abcdef01234567"
KIND = f'multipart/related; boundary="{BOUNDARY}"; type="application/json"'
RED, BLUE = png("red"), png("blue")
CHAT = "/v1/chat/completions"
PARTS = ("chat", "responses", "messages")


def name(data: bytes, kind: str = "blake3") -> str:
    made = blake3(data) if kind == "blake3" else hashlib.sha256(data)
    return f"{kind}-{made.hexdigest()}"


def cid(of: str) -> str:
    return f"cid:{of}@{BOUNDARY}"


def body(told: object, *brought: bytes, called: str | None = None) -> bytes:
    """A body whose parts are `brought`."""
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    made = f"--{BOUNDARY}\r\ncontent-type: application/json\r\n\r\n".encode() + text
    for data in brought:
        head = f"\r\n--{BOUNDARY}\r\ncontent-id: <{called or name(data)}>\r\n\r\n"
        made += head.encode() + data
    return made + f"\r\n--{BOUNDARY}--\r\n".encode()


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, text("what?")]}], **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def named(data: bytes, kind: str = "blake3") -> str:
    return f"data:image/png;base64,{cid(name(data, kind))}"


def ask(
    served: Served, told: object, *brought: bytes, key: str = "none", path: str = CHAT, **more: Any
) -> httpx.Response:
    headers = {"content-type": KIND, "authorization": f"Bearer {key}"}
    return served.http.post(path, content=body(told, *brought, **more), headers=headers)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that keeps at most 1 MiB of what is sent."""
    with serving(ServerOptions(port=0, served_model_name=("demo",), max_inflight_mb=4)) as served:
        yield served


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("anna:key-a\nben:key-b\n")
    options = ServerOptions(port=0, served_model_name=("demo",))
    with serving(options, extras=(KeySettings(str(keys)),)) as served:
        yield served


# ---- the format


@pytest.mark.parametrize("kind", ["blake3", "sha256"])
def test_the_json_comes_back_byte_for_byte(kind: str) -> None:
    data = random.Random(1).randbytes(3001)
    told = '{ "a" : "%s", "b": "x%sy", "t": "cid:blake3-%s@other"}'
    inline = base64.b64encode(data).decode()
    there = cid(name(data, kind))
    parsed = RelatedBody(
        body((told % (there, there, "0" * 64)).encode(), data, called=name(data, kind)), BOUNDARY
    )
    found = parsed.find(SentBytes(1 << 20), Client())
    wanted = (told % (inline, inline, "0" * 64)).encode()
    assert parsed.whole(found) == wanted
    assert parsed.size(found) == len(wanted)


def test_a_boundary_within_bytes_is_the_clients_own_fault_and_no_more() -> None:
    data = b"x" * 50 + f"\r\n--{BOUNDARY}--".encode() + b"y"
    with pytest.raises(InvalidRequest, match="the digest of part 1 is not"):
        RelatedBody(body({"a": cid(name(data))}, data), BOUNDARY)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "does not begin"),
        (b"{}", "does not begin"),
        (f"--{BOUNDARY}\r\n".encode(), "does not end"),
        (f"--{BOUNDARY}\r\n\r\n{{}}\r\n--{BOUNDARY}xx".encode(), "does not end"),
        (body({})[:-8], "does not end"),
        (f"--{BOUNDARY}\r\n{'x' * 2000}\r\n--{BOUNDARY}--".encode(), "headers of part 0"),
        (body({}, RED), "not referenced"),
        (body({"a": cid(name(RED))}, BLUE, called="red"), "has no Content-ID"),
        (body({"a": cid(name(RED))}, BLUE, called=name(RED)), "the digest of part 1 is"),
        (
            body({"a": [cid(name(RED))] * (related.MAX_NAMES + 1)}),
            "more than 8192 references to bytes",
        ),
    ],
)
def test_a_malformed_body_is_refused_by_a_sentence(sent: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        RelatedBody(sent, BOUNDARY)


@pytest.mark.parametrize(
    "given", ["", "; boundary=", "; boundary=short", f'; boundary="{"x" * 71}"']
)
def test_a_boundary_has_to_be_long_and_plain(given: str) -> None:
    with pytest.raises(InvalidRequest, match="16 to 70"):
        boundary_of(f"multipart/related{given}")


def test_a_hundred_thousand_names_are_refused_before_any_is_looked_up() -> None:
    names = [cid(name(str(i).encode())) for i in range(100_000)]
    with pytest.raises(InvalidRequest, match="8192"):
        RelatedBody(body({"a": names}), BOUNDARY)


class Searched(bytes):
    """A body that counts the searches in it."""

    searches = 0

    def find(self, *wanted: Any) -> int:
        self.searches += 1
        return super().find(*wanted)


def test_a_boundary_in_no_name_counts_as_one() -> None:
    assert RelatedBody(body({"a": f"@{BOUNDARY}" * 8192}), BOUNDARY).names == []
    sent = Searched(body({"a": f"@{BOUNDARY}" * 100_000}))
    with pytest.raises(InvalidRequest, match="8192"):
        RelatedBody(sent, BOUNDARY)
    assert sent.searches < 8300


def test_as_many_parts_as_names_are_read_and_one_more_is_refused_by_their_count() -> None:
    contents = [str(i).encode() for i in range(related.MAX_NAMES)]
    json_names = {"a": [cid(name(each)) for each in contents]}
    assert len(RelatedBody(body(json_names, *contents), BOUNDARY).brought) == related.MAX_NAMES
    with pytest.raises(InvalidRequest, match="more than 8192 parts after the JSON") as refused:
        RelatedBody(body(json_names, *contents, b"one more"), BOUNDARY)
    assert refused.value.code == "too_many_names"


def test_what_comes_along_replaces_nothing_that_the_body_names() -> None:
    sent, told = SentBytes(2 * OVERHEAD), {"a": [cid(name(RED)), cid(name(BLUE))]}
    sent.put(Client(), "", name(RED), RED)
    assert set(RelatedBody(body(told, BLUE), BOUNDARY).find(sent, Client())) == {
        name(RED),
        name(BLUE),
    }
    assert sent.get(Client(), "", name(RED)) is None


def test_all_lacking_names_are_told_at_once() -> None:
    sent = SentBytes(1 << 20)
    told = {"a": [cid(name(each)) for each in (RED, BLUE, RED, b"x")]}
    with pytest.raises(UnknownDigests) as refused:
        RelatedBody(body(told, BLUE), BOUNDARY).find(sent, Client())
    assert refused.value.digests == (name(RED), name(b"x"))
    found = RelatedBody(body(told, RED, b"x"), BOUNDARY).find(sent, Client())
    assert found == {name(each): each for each in (RED, BLUE, b"x")}


# ---- the store


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_recently_used_bytes_make_room() -> None:
    size = 100 + OVERHEAD
    sent = SentBytes(2 * size)
    for each in "abc":
        sent.put(Client(), "", each, bytes(100))
        sent.get(Client(), "", "a")
    assert [sent.get(Client(), "", each) is not None for each in "abc"] == [True, False, True]
    assert sent.nbytes == 2 * size
    sent.put(Client(), "", "large", bytes(3 * size))
    assert sent.get(Client(), "", "large") is None, "it would leave room for nothing else"
    sent.put(Client(), "", "a", bytes(100))
    assert sent.nbytes == 2 * size, "what is sent again counts once"


def test_one_of_several_keys_has_half_and_the_fattest_makes_room() -> None:
    size = 100 + OVERHEAD
    sent = SentBytes(4 * size)
    anna, ben, carl = (Client(name, limited=True) for name in ("anna", "ben", "carl"))
    for i in range(9):
        sent.put(anna, f"salt {i}", str(i), bytes(100))
    assert sent.nbytes == 2 * size
    sent.put(ben, "", "b", bytes(100))
    sent.put(carl, "", "c", bytes(100))
    sent.put(ben, "", "d", bytes(100))
    kept = [
        sent.get(*each) is not None for each in ((ben, "", "b"), (ben, "", "d"), (carl, "", "c"))
    ]
    assert kept == [True, True, True]
    assert sent.nbytes <= 4 * size


def test_unused_bytes_expire() -> None:
    clock = Clock()
    sent = SentBytes(1 << 20, clock)
    sent.put(Client(), "", "a", b"a")
    clock.now = KEPT_SECONDS
    assert sent.get(Client(), "", "a") == b"a"
    clock.now *= 2.5
    assert sent.get(Client(), "", "a") is None
    sent.put(Client("other"), "", "b", b"b")
    assert sent.nbytes == 1 + OVERHEAD, "what nobody asks for goes too"


# ---- a server


@pytest.mark.parametrize("dialect", PARTS)
def test_every_dialect_reads_names(served: Served, dialect: str) -> None:
    data = png("green", (70, 64 + PARTS.index(dialect)))
    path, told = {
        "chat": (CHAT, chat(named(data))),
        "responses": (
            "/v1/responses",
            {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": named(data), "detail": "auto"}]}]},
        ),
        "messages": (
            "/v1/messages",
            {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": [
                {"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": cid(name(data))}}]}]},
        ),
    }[dialect]  # fmt: skip
    lacking = ask(served, told, path=path)
    assert lacking.status_code == 400
    error = lacking.json()["error"]
    told_code = error["details"]["error_code"] if dialect == "messages" else error["code"]
    assert told_code == "unknown_digests"
    listed = error["details"] if dialect == "messages" else error
    assert listed["digests"] == [name(data)]
    assert ask(served, told, data, path=path).status_code == 200
    again = ask(served, told, path=path)
    assert again.status_code == 200
    assert "Hello!" in again.text


def test_the_dialect_refuses_a_named_body_as_it_refuses_the_clients(served: Served) -> None:
    noise = b"no image at all" * 99
    inline = served.http.post(CHAT, json=chat(data_url(noise)))
    by_name = ask(served, chat(named(noise)), noise)
    assert inline.status_code == by_name.status_code == 400
    assert inline.json() == by_name.json()
    cut = b'{"messages": ['
    as_json = {"content-type": "application/json"}
    whole = served.http.post(CHAT, content=cut, headers=as_json)
    assert ask(served, cut).json() == whole.json()


def test_what_was_sent_is_forgotten_by_size(served: Served) -> None:
    for i in range(12):
        data = random.Random(i).randbytes(150_000)
        ask(served, chat(named(data)), data)
    first, last = (chat(named(random.Random(i).randbytes(150_000))) for i in (0, 11))
    assert ask(served, first).json()["error"]["code"] == "unknown_digests"
    assert ask(served, last).json()["error"]["code"] == "invalid_image"
    assert served.front.metrics.value("saccade_stored_body_bytes") <= 1 << 20


def test_a_body_that_would_grow_beyond_the_limit_is_never_built(served: Served) -> None:
    data = bytes(1_000_000)
    told = {"a": [cid(name(data))] * 8000}
    answer = ask(served, told, data)
    assert answer.status_code == 413
    assert "--max-body-mb" in answer.json()["error"]["message"]


def test_bytes_that_were_named_are_counted(served: Served) -> None:
    data = png("green", (81, 81))
    ask(served, chat(named(data)), data)
    before = served.front.metrics.value("saccade_referenced_bytes_total")
    ask(served, chat(named(data), named(data)))
    assert served.front.metrics.value("saccade_referenced_bytes_total") == before + len(data)


# ---- tenants


def test_a_key_never_learns_what_another_has_sent(keyed: Served) -> None:
    told = chat(named(RED))
    assert ask(keyed, told, RED, key="key-a").status_code == 200
    assert ask(keyed, told, key="key-a").status_code == 200
    known, unknown = ask(keyed, told, key="key-b"), ask(keyed, chat(named(BLUE)), key="key-b")
    assert known.status_code == unknown.status_code == 400
    assert known.text.replace(name(RED), "X") == unknown.text.replace(name(BLUE), "X")
    assert ask(keyed, told, key="wrong").status_code == 401
    # and a part that claims to be what another has sent is compared with its bytes
    forged = ask(keyed, told, BLUE, key="key-b", called=name(RED))
    assert forged.json()["error"]["code"] == "wrong_digest"
    assert ask(keyed, told, key="key-b").json()["error"]["code"] == "unknown_digests"


def test_a_salt_never_learns_what_another_has_sent(served: Served) -> None:
    data = png("white", (90, 91))
    assert ask(served, chat(named(data), cache_salt="one"), data).status_code == 200
    assert ask(served, chat(named(data), cache_salt="one")).status_code == 200
    for other in ({"cache_salt": "two"}, {}, {"cache_salt": None}):
        lacking = ask(served, chat(named(data), **other))
        assert lacking.json()["error"]["code"] == "unknown_digests"


# ---- a router


@pytest.mark.parametrize("form", ["data:image/png;base64,%s", "%s"])
def test_a_router_ranks_a_named_image_as_the_image(form: str) -> None:
    inline = form % base64.b64encode(RED).decode()
    part = {"type": "image", "image": inline}
    sent = {"messages": [{"role": "user", "content": [part]}]}
    whole = bearing_of_body(json.dumps(sent).encode())
    part["image"] = form % cid(name(RED))
    assert whole.keys == (blake3(RED).digest(),)
    assert bearing_of_body(body(sent)) == bearing_of_body(body(sent, RED)) == whole


def test_a_router_reads_no_malformed_body() -> None:
    for sent in (b"--", b"--\r\n", b"--x\r\n\r\n\r\n--x--", body({})[:-9], b"--" + bytes(300)):
        assert bearing_of_body(sent).keys == ()
        first_part(sent)


def test_only_a_whole_name_at_the_end_is_one() -> None:
    whole = cid(name(RED))
    assert name_at_end(whole) == name_at_end(f"data:x;base64,{whole}") == name(RED)
    for other in ("", whole + " ", whole[:-15], whole[1:], whole.upper(), "x" * 5000):
        assert name_at_end(other) is None


def test_names_pass_through_a_router(served: Served) -> None:
    data = png("green", (91, 91))
    with routed(served) as router:
        assert ask(router, chat(named(data))).json()["error"]["digests"] == [name(data)]
        assert ask(router, chat(named(data)), data).status_code == 200
        assert ask(router, chat(named(data))).status_code == 200
        for each in (router, served):
            assert "multipart/related" in each.http.get("/version").json()["accepts"]
