"""Web pages and a server that asks for no key: its own page may use it, others may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from saccade.core.options import ServerOptions
from saccade.edge.headers import is_loopback
from tests.helpers.images import png
from tests.helpers.served import Served, routed, serving

HI = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--b--\r\n'
    % png()
)
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}
BLOB = {
    "origin": "http://evil.example",
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "no-cors",
}
"""What `fetch(url, {mode: "no-cors", method: "POST", body: new Blob([json])})` sends: no type."""

POSTS: tuple[tuple[str, dict[str, str], bytes], ...] = (
    ("/v1/chat/completions", {}, HI),
    ("/v1/responses", {}, b'{"input": "Hi", "max_output_tokens": 4}'),
    ("/v1/messages", {}, b'{"model": "demo", "max_tokens": 4, ' + HI[1:]),
    ("/flush_cache", {}, b""),
    ("/v1/files", MULTIPART, FORM),
)


@pytest.fixture(params=["direct", "routed"])
def either(module_server: Served, module_router: Served, request: pytest.FixtureRequest) -> Served:
    return module_server if request.param == "direct" else module_router


def test_a_name_that_was_made_to_mean_this_machine_is_refused(either: Served) -> None:
    port = either.address.rpartition(":")[2]
    for path in ("/v1/files", "/v1/models", "/metrics", "/", "/health"):
        answer = either.http.get(path, headers={"host": f"evil.example:{port}"})
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "127.8.9.10", "[::1]:1"):
        assert either.http.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("localhost.evil.example", "127.0.0.1.evil.example", "8.8.8.8", "[", "", "a@b:c"):
        assert either.http.get("/v1/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(("path", "headers", "body"), POSTS, ids=[post[0] for post in POSTS])
@pytest.mark.parametrize(
    "page",
    [
        BLOB,
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1", "sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_is_refused(
    either: Served, path: str, headers: dict[str, str], body: bytes, page: dict[str, str]
) -> None:
    before = len(either.engine.received)
    answer = either.http.post(path, content=body, headers={**headers, **page})
    assert answer.status_code == 403 and "--cors-origins" in answer.text
    assert len(either.engine.received) == before


@pytest.mark.parametrize(("path", "headers", "body"), POSTS, ids=[post[0] for post in POSTS])
def test_programs_and_the_servers_own_page_are_served(
    either: Served, path: str, headers: dict[str, str], body: bytes
) -> None:
    origin = either.address
    own: tuple[Mapping[str, str], ...] = (
        {},
        {"origin": origin, "sec-fetch-site": "same-origin"},
        {"origin": origin},
        {"sec-fetch-site": "none"},
    )
    for page in own:
        answer = either.http.post(path, content=body, headers={**headers, **page})
        assert answer.status_code == 200, answer.text


def test_a_link_to_the_page_is_followed(either: Served) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    shown = either.http.get("/", headers={**link, "sec-fetch-dest": "document"})
    assert shown.status_code == 200 and "<html" in shown.text
    framed = either.http.get("/", headers={**link, "sec-fetch-dest": "iframe"})
    assert framed.status_code == 403


def test_a_page_behind_a_router_with_a_name_is_the_servers_own(module_server: Served) -> None:
    with routed(module_server, allowed_hosts=("box.example",)) as router:
        port = router.address.rpartition(":")[2]
        named = {"host": f"box.example:{port}", "origin": f"http://box.example:{port}"}
        assert router.http.post(POSTS[0][0], content=HI, headers=named).status_code == 200
        other = {**named, "origin": "http://evil.example"}
        assert router.http.post(POSTS[0][0], content=HI, headers=other).status_code == 403


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    options = ServerOptions(
        port=0,
        served_model_name=("demo",),
        cors_origins=("https://app.example",),
        allowed_hosts=("Box.example",),
    )
    with serving(options) as served:
        yield served


def test_names_and_origins_that_the_user_gives_are_let_in(named: Served) -> None:
    app = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    answer = named.http.post(POSTS[0][0], content=HI, headers={"host": "box.EXAMPLE:80", **app})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    asked = {**app, "access-control-request-method": "POST"}
    assert named.http.options(POSTS[0][0], headers=asked).status_code == 200
    asked["origin"] = "https://evil.example"
    assert named.http.options(POSTS[0][0], headers=asked).status_code == 400


def test_no_page_of_another_origin_may_send_a_key(either: Served) -> None:
    """Its browser asks before; a key that comes all the same is no page's."""
    asked = {**BLOB, "access-control-request-headers": "authorization"}
    asked["access-control-request-method"] = "POST"
    answer = either.http.options(POSTS[0][0], headers=asked)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    keyed = {**BLOB, "authorization": "Bearer none"}
    assert either.http.post(POSTS[0][0], content=HI, headers=keyed).status_code == 200


def test_a_server_with_a_key_looks_at_the_key_alone() -> None:
    options = ServerOptions(port=0, served_model_name=("demo",), api_key="k")
    with serving(options) as served:
        headers: dict[str, Any] = {"host": "any.example", **BLOB}
        answer = served.http.post(POSTS[0][0], content=HI, headers=headers)
        assert answer.status_code == 401
        headers["authorization"] = "Bearer k"
        answer = served.http.post(POSTS[0][0], content=HI, headers=headers)
        assert answer.status_code == 200


def test_which_addresses_are_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.1.2.3", "", "no such")))
