"""The path of a picture, end to end: what is done once is counted by the metrics that users see;
what is hostile is refused; what dies takes nothing with it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from saccade_bench.fixtures.server import Server, serving
from tests.e2e.origin import Origin, serving_files
from tests.fixtures.tiny import make_checkpoint, picture
from tests.helpers.images import data_url, text_part, user
from tests.media.pictures import encode

pytestmark = pytest.mark.more

OPTIONS = (
    "--dtype",
    "float32",
    "--served-model-name",
    "tiny",
    "--max-total-tokens",
    "8192",
    "--max-running-requests",
    "16",
)
DECODED, ENCODED, SHIPPED = (
    "saccade_images_decoded_total",
    "saccade_images_encoded_total",
    "saccade_image_bytes_shipped_total",
)
FETCHED = "saccade_images_fetched_total"
LEVELS = ("kv", "embedding", "pixels")

_seeds = itertools.count(1000)
_http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def png(height: int = 64, width: int = 96, seed: int | None = None) -> bytes:
    """A picture that no other test has sent, unless `seed` says which."""
    return encode(picture(height, width, seed=next(_seeds) if seed is None else seed))


def image(source: bytes | str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": source if isinstance(source, str) else data_url(source), **fields},
    }


def body(messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def ask(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = _http.post(f"{server.url}/v1/chat/completions", json=body(messages, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def words(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@contextmanager
def spent(server: Server, *names: str) -> Iterator[Callable[[], list[float]]]:
    """What counters have gone up by since here."""
    before = [server.metric(name) for name in names]
    yield lambda: [server.metric(name) - value for name, value in zip(names, before)]


def hits(server: Server) -> list[float]:
    return [server.metric("saccade_image_hits_total", level=level) for level in LEVELS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    with serving_files() as origin:
        yield origin


@contextmanager
def to_be_killed(folder: Path, work: Path, *options: str) -> Iterator[Server]:
    """`serving` insists on an orderly end, which a killed server has not. The server's temporary
    directory is its own.
    """
    (work / "temporary").mkdir()
    with suppress(AssertionError), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(work / "temporary"))
        with serving(folder, work, *OPTIONS, *options) as server:
            patch.undo()
            yield server


def left_of(server: Server) -> list[Path]:
    """Temporary files of a server that has ended."""
    return list((server.log.parent / "temporary").iterdir())


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Everything on; pictures may be fetched from localhost by that name, and uploaded.

    The last test kills it.
    """
    work = tmp_path_factory.mktemp("server")
    fetching = (
        "--allow-private-media",
        "--allowed-media-domains",
        "localhost",
        "--tune",
        "fetch_timeout=5",
    )
    options = (*fetching, "--files-dir", str(work / "files"), "--tune", "max_image_bytes=1000000")
    with to_be_killed(folder, work, *options) as server:
        yield server


@pytest.fixture(scope="module")
def bare(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No prefix cache, room for one embedding, and the default policy for addresses.

    The last test kills it.
    """
    work = tmp_path_factory.mktemp("bare")
    options = (
        *("--tune", "disable_radix_cache=true"),
        "--embedding-cache-device-mb",
        "0",
        "--tune",
        "log_slow_seconds=0",
    )
    with to_be_killed(folder, work, *options) as server:
        yield server


# ---- once


def test_a_picture_a_round_is_decoded_encoded_and_shipped_once(server: Server) -> None:
    messages: list[dict[str, Any]] = []
    sizes = [(64 + 32 * (i % 3), 96 + 32 * (i % 2)) for i in range(8)]
    with spent(server, DECODED, ENCODED, SHIPPED) as so_far:
        for i, (height, width) in enumerate(sizes, 1):
            messages.append(user(image(png(height, width)), text_part("and this?")))
            messages.append({"role": "assistant", "content": words(ask(server, *messages))})
            assert so_far() == [i, i, sum(h * w * 3 for h, w in sizes[:i])]
    with spent(server, DECODED, ENCODED, SHIPPED) as so_far:
        answer = ask(server, *messages, user(text_part("which was best?")), saccade={"trace": True})
        assert so_far() == [0, 0, 0]
    assert [each["found"] for each in answer["saccade"]["images"]] == ["kv"] * 8


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_the_memory_of_a_request_with_seen_pictures_serves_the_next(server: Server) -> None:
    """Fresh pages cost the front end as much as all else that a seen picture asks of it."""
    pictures = [image(png() + bytes(400_000)) for _ in range(12)]

    def fresh() -> int:
        """The pages that the system has given the front end so far."""
        stat = Path(f"/proc/{server.process.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[7])

    for _ in range(3):
        ask(server, user(*pictures, text_part("again")))
    before = fresh()
    ask(server, user(*pictures, text_part("again")))
    assert (fresh() - before) * mmap.PAGESIZE < 12 * 400_000 / 4


def test_sixteen_requests_with_one_new_picture_fetch_decode_and_encode_it_once(
    server: Server, origin: Origin
) -> None:
    origin.files["/one.png"], origin.pause = png(), 0.5
    for source in (png(), origin.url("/one.png")):
        with spent(server, FETCHED, DECODED, ENCODED) as so_far, ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(
                    lambda _, source=source: words(
                        ask(server, user(image(source), text_part("what?")), max_tokens=4)
                    ),
                    range(16),
                )
            )
            assert so_far() == [isinstance(source, str), 1, 1]
        assert len(set(answers)) == 1
    origin.pause = 0.0
    assert origin.gets["/one.png"] == 1


def test_however_a_picture_comes_it_is_one_picture(server: Server, origin: Origin) -> None:
    data = png()
    origin.files["/same.png"] = data
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    id = client.files.create(file=("same.png", data), purpose="vision").id
    parts = [
        image(data),
        image(origin.url("/same.png")),
        {"type": "image_file", "image_file": {"file_id": id}},
        {"type": "file", "file": {"file_id": id}},
    ]
    with spent(server, DECODED, ENCODED) as so_far:
        together = ask(server, user(*parts, *parts, text_part("one?")), saccade={"trace": True})[
            "saccade"
        ]["images"]
        answers = {words(ask(server, user(part, text_part("one?")))) for part in parts}
        assert so_far() == [1, 1]
    assert len(answers) == 1
    assert len({each["digest"] for each in together}) == 1 and len(together) == 8


def test_another_salt_has_its_own_everything(server: Server, origin: Origin) -> None:
    origin.files["/salt.png"] = png()
    message = user(image(origin.url("/salt.png")), text_part("what?"))
    answers = []
    for salt in ("red", "blue"):
        with spent(server, FETCHED, DECODED, ENCODED, "saccade_cached_tokens_total") as so_far:
            answers.append(words(ask(server, message, cache_salt=salt)))
            assert so_far() == [1, 1, 1, 0]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_without_the_prefix_cache_a_picture_is_still_encoded_once(bare: Server) -> None:
    message = user(image(png()), text_part("what?"))
    before = hits(bare)
    with spent(bare, DECODED, ENCODED) as so_far:
        answers = [words(ask(bare, message)) for _ in range(3)]
        assert so_far() == [1, 1]
    assert [now - then for now, then in zip(hits(bare), before)] == [0, 2, 0]
    assert len(set(answers)) == 1


def cold_warm_and_mixed(server: Server) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages and their answers, which are the same whatever was seen before."""
    a, b, c = (png(height, width) for height, width in ((64, 64), (96, 160), (160, 128)))
    messages = [
        user(image(a), text_part("one"), image(b), text_part("two"), image(c), text_part("which?")),
        user(text_part("again "), image(c), image(a), text_part("which?")),
        user(image(b), text_part("which?")),
    ]
    cold = [
        words(ask(server, message, cache_salt=f"cold {i}", max_tokens=24))
        for i, message in enumerate(messages)
    ]
    first = [
        words(ask(server, message, max_tokens=24)) for message in messages
    ]  # the second and the third find embeddings
    warm = [words(ask(server, message, max_tokens=24)) for message in messages]
    mixed = [
        words(ask(server, message, cache_salt="mixed", max_tokens=24))
        for message in reversed(messages)
    ][::-1]
    assert cold == first == warm == mixed
    assert len(set(cold)) == 3
    return messages, cold


def test_answers_are_the_same_cold_warm_and_mixed(server: Server) -> None:
    cold_warm_and_mixed(server)


@pytest.mark.slow
def test_without_the_prefix_cache_answers_are_those_with_it(server: Server, bare: Server) -> None:
    messages, cold = cold_warm_and_mixed(server)
    assert [words(ask(bare, message, max_tokens=24)) for message in messages] == cold


# ---- it says why


def traced(server: Server, *parts: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = ask(server, user(*parts), saccade={"trace": True}, **fields)[
        "saccade"
    ]["images"]
    return images


def test_the_trace_says_where_a_picture_was_found_and_why_not_sooner(server: Server) -> None:
    data = png(200, 100)
    new = traced(server, image(data), text_part("what is it?"))[0]
    assert (
        new["place"] == "messages[0].content[0]"
        and new["format"] == "PNG"
        and new["bytes"] == len(data)
    )
    assert (new["size"], new["resized"]) == (
        {"width": 100, "height": 200},
        {"width": 96, "height": 192},
    )
    assert new["tokens"] == 18
    assert (new["found"], new["missed"]) == (
        "none",
        {"kv": "never seen", "embedding": "never seen"},
    )
    assert (
        all(new["ms"][stage] > 0 for stage in ("fetch", "digest", "decode", "encode"))
        and new["ms"]["wait"] >= 0
    )
    same = traced(server, image(data), text_part("what is it, and where?" * 3))[0]
    assert (same["found"], same["missed"], same["digest"]) == ("kv", {}, new["digest"])
    elsewhere = traced(server, text_part("look here: "), image(data))[0]
    assert (elsewhere["found"], elsewhere["tier"], elsewhere["missed"]) == (
        "embedding",
        "device",
        {"kv": "other prompt"},
    )
    assert "tier" not in new and "tier" not in same
    assert [elsewhere["ms"][stage] for stage in ("decode", "wait", "encode")] == [0, 0, 0]
    smaller = traced(server, image(data, max_pixels=8192))[0]
    assert (smaller["found"], smaller["missed"]["embedding"]) == ("none", "other settings")


@pytest.mark.parametrize("first", ["mine", None])
def test_what_only_another_tenant_has_sent_counts_as_never_seen(
    server: Server, first: str | None
) -> None:
    data = png()
    assert traced(server, image(data), cache_salt=first)[0]["found"] == "none"
    for salt in ("yours", "theirs" if first is None else None):
        told = traced(server, image(data), cache_salt=salt)[0]
        assert told["found"] == "none"
        assert told["missed"] == {"kv": "never seen", "embedding": "never seen"}


def test_the_page_with_a_pictures_end_is_cached_only_when_it_is_full(server: Server) -> None:
    data = png(256, 256)
    ask(server, user(image(data)), max_tokens=1)
    again = traced(server, image(data), text_part("?"), max_tokens=1)[0]
    assert (again["found"], again["missed"]) == ("embedding", {"kv": "no full page"})


def test_after_evictions_the_trace_says_that_a_prompt_may_have_been_evicted(server: Server) -> None:
    part = image(png(200, 100))
    traced(server, part, text_part("what is it?"))
    lengths = [
        ask(server, user(text_part(f"{first} " * 1800)))["usage"]["prompt_tokens"]
        for first in "abc"
    ]
    assert sum(lengths) > 8192, "more than the cache holds: all that was there before has gone"
    again = traced(server, part, text_part("what is it?"))[0]
    assert (again["found"], again["missed"]) == ("embedding", {"kv": "other prompt or evicted"})


def test_pixels_that_are_still_there_are_encoded_again_without_decoding(bare: Server) -> None:
    data = png()
    traced(bare, image(data))
    traced(bare, image(png()))  # takes the only place among the embeddings
    before = hits(bare)
    with spent(bare, DECODED, ENCODED) as so_far:
        again = traced(bare, image(data))[0]
        assert so_far() == [0, 1]
    assert [now - then for now, then in zip(hits(bare), before)] == [0, 0, 1]
    assert (again["found"], again["missed"]) == (
        "pixels",
        {"kv": "prefix cache off", "embedding": "evicted"},
    )
    assert again["ms"]["decode"] == 0 < again["ms"]["encode"]


def test_the_last_chunk_of_a_stream_carries_the_trace(server: Server) -> None:
    message = user(image(png()), text_part("what?"))
    fields = {"stream": True, "saccade": {"trace": True}}
    with _http.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body([message], **fields)
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert [each["found"] for each in json.loads(lines[-2])["saccade"]["images"]] == ["none"]
    assert not any("saccade" in line for line in lines[:-2])


def test_slow_requests_are_logged_with_their_trace(bare: Server) -> None:
    def slow() -> list[str]:
        return [line for line in bare.log.read_text().splitlines() if "was slow" in line]

    before, deadline = len(slow()), time.monotonic() + 10
    ask(bare, user(image(png())))
    while len(slow()) == before and time.monotonic() < deadline:  # its end may be yet to be logged
        time.sleep(0.01)
    logged = json.loads(slow()[-1].partition("was slow: ")[2])
    assert [each["found"] for each in logged["images"]] == ["none"]
    assert logged["ms"]["total"] >= logged["ms"]["first_token"] >= logged["ms"]["prepared"] > 0


def test_a_prompt_is_counted_without_decoding(server: Server) -> None:
    message = user(
        image(png(300, 200)), text_part("how many?"), image(png(90, 64), max_pixels=2048)
    )
    with spent(server, DECODED, ENCODED, SHIPPED) as so_far:
        counted = _http.post(f"{server.url}/tokenize", json=body([message])).json()
        assert so_far() == [0, 0, 0]
    assert [each["tokens"] for each in counted["images"]] == [54, 1]
    assert counted["images"][0]["resized"] == {"width": 192, "height": 288}
    assert (
        counted["count"] == len(counted["tokens"]) == ask(server, message)["usage"]["prompt_tokens"]
    )
    assert counted["max_model_len"] == 4096


def test_the_metrics_of_the_picture_path_have_their_names_from_the_start(bare: Server) -> None:
    samples = {
        line.split()[0]
        for line in httpx.get(f"{bare.url}/metrics").text.splitlines()
        if not line.startswith("#")
    }
    assert samples >= {
        "saccade_images_received_total",
        "saccade_images_fetched_total",
        "saccade_images_decoded_total",
        "saccade_image_bytes_shipped_total",
        "saccade_images_encoded_total",
        *(f'saccade_image_hits_total{{level="{level}"}}' for level in LEVELS),
        "saccade_arena_bytes_in_use",
        "saccade_image_worker_restarts_total",
    }


# ---- hostile


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claiming(height: int, width: int, rows: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def many_frames() -> bytes:
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\x00\x02\x02\x44\x01\x00"
    return (
        b"GIF89a"
        + struct.pack("<HH", 60000, 60000)
        + b"\x80\x00\x00"
        + bytes(6)
        + frame * 10_000
        + b";"
    )


HOSTILE: dict[str, tuple[bytes | str, str]] = {
    "truncated": (png(120, 120, seed=1)[:3000], "cannot be decoded"),
    "truncated in its header": (png(seed=1)[:20], "damaged or cut short"),
    "renamed": (b"just some words, called picture.png", "is text"),
    "zero bytes": (b"", "empty"),
    "50,000 x 50,000": (
        claiming(50_000, 50_000),
        "50000 x 50000 px (2500 Mpx); the limit is 179 Mpx",
    ),
    "decompression bomb": (claiming(20_000, 20_000, bytes(5_000_000)), "20000 x 20000 px"),
    "bomb with a modest header": (claiming(16, 16, bytes(20_000_000)), ""),
    "10,000 frames": (many_frames(), "60000 x 60000 px"),
    "SVG": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "invalid base64": ("data:image/png;base64,@@@@", "not valid base64"),
    "other scheme": ("gopher://x/y.png", "must start with"),
    "over the byte limit": (b"\x89PNG\r\n\x1a\n" + bytes(1_100_000), "over 1 MB encoded"),
}


@contextmanager
def at_most_one_second_of_cpu(server: Server) -> Iterator[None]:
    """Of the server and everything it has started; /health answers meanwhile."""
    front = psutil.Process(server.process.pid)
    everyone = [front, *front.children(recursive=True)]
    done = threading.Event()
    states: list[int] = []

    def watch() -> None:
        while not states or not done.wait(0.05):
            states.append(_http.get(f"{server.url}/health", timeout=2).status_code)

    before = sum(sum(process.cpu_times()[:2]) for process in everyone)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
    assert sum(sum(process.cpu_times()[:2]) for process in everyone) - before < 1.0
    assert set(states) == {200}


def refused(server: Server, *messages: dict[str, Any], place: str | None) -> dict[str, Any]:
    with at_most_one_second_of_cpu(server):
        response = _http.post(f"{server.url}/v1/chat/completions", json=body(messages))
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == place
    return error


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "bomb with a modest header"])
def test_hostile_pictures_are_refused_at_their_place(server: Server, name: str) -> None:
    source, reason = HOSTILE[name]
    good = image(png(seed=2))
    error = refused(
        server,
        user(text_part("first"), good),
        user(image(source), text_part("what?")),
        place="messages[1].content[0]",
    )
    assert reason in error["message"]


def test_a_picture_that_cannot_be_decoded_fails_all_who_wait_for_it_and_nobody_else(
    server: Server,
) -> None:
    bad, good = image(HOSTILE["truncated"][0]), image(png())
    messages = [user(*[text_part("so")] * i, bad, good) for i in range(8)] + [
        user(good, text_part("and?"))
    ]
    for _ in range(2):  # a failure is not remembered, and not tried again for the same request
        with ThreadPoolExecutor(9) as pool:
            answers = list(
                pool.map(
                    lambda m: _http.post(f"{server.url}/v1/chat/completions", json=body([m])),
                    messages,
                )
            )
        errors = [answer.json()["error"] for answer in answers[:8]]
        assert [answer.status_code for answer in answers] == [400] * 8 + [200]
        assert [error["param"] for error in errors] == [
            f"messages[0].content[{i}]" for i in range(8)
        ]
        assert all("cannot be decoded" in error["message"] for error in errors)
    server.wait_for_metric("saccade_requests_running", 0)
    server.wait_for_metric("saccade_requests_waiting", 0)
    server.wait_for_metric("saccade_arena_bytes_in_use", 0)


def test_a_bomb_behind_a_modest_header_costs_no_more_than_its_header_says(server: Server) -> None:
    with at_most_one_second_of_cpu(server):
        ask(
            server,
            user(image(HOSTILE["bomb with a modest header"][0]), text_part("what?")),
            max_tokens=1,
        )


def test_a_redirect_to_another_host_is_checked_again(server: Server, origin: Origin) -> None:
    origin.files["/x.png"] = png()
    origin.target = origin.url("/x.png", host="127.0.0.1")
    error = refused(server, user(image(origin.url("/redirect"))), place="messages[0].content[0]")
    assert error["code"] == "image_address_refused" and "'127.0.0.1'" in error["message"]
    assert origin.gets["/x.png"] == 0


def test_a_server_that_drips_is_given_up(server: Server, origin: Origin) -> None:
    error = refused(server, user(image(origin.url("/drip"))), place="messages[0].content[0]")
    assert error["code"] == "image_unreachable" and "took longer than 5 s" in error["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"],
)
def test_a_name_or_spelling_of_a_private_address_is_refused(
    bare: Server, origin: Origin, host: str
) -> None:
    origin.gets.clear()
    error = refused(
        bare, user(image(origin.url("/secret.png", host))), place="messages[0].content[0]"
    )
    assert error["code"] == "image_address_refused"
    assert not origin.gets


def test_ten_thousand_pictures_are_refused_before_any_is_looked_at(server: Server) -> None:
    error = refused(
        server,
        user(*[image("data:image/png;base64,AAAA")] * 10_000),
        place="messages[0].content[256]",
    )
    assert (
        "10000 images; the limit is 256" in error["message"]
        and "--max-images-per-request" in error["message"]
    )


def test_too_many_tokens_are_refused_before_decoding(server: Server) -> None:
    big = [image(png(256, 256))] * 64
    with spent(server, DECODED) as so_far:
        error = refused(server, user(*big), place="messages")
        assert so_far() == [0]
    assert (
        error["code"] == "context_length_exceeded"
        and "4096" in error["message"]
        and "max_pixels" in error["message"]
    )


# ---- death


def image_workers(server: Server) -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process(server.process.pid).children(recursive=True)
        if p.name() == "saccade-decode"
    ]


def named_shared_memory(process: psutil.Process) -> list[str]:
    return [
        line
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line and not line.endswith("(deleted)")
    ]


def test_a_killed_image_worker_is_replaced_and_its_pictures_are_decoded_all_the_same(
    server: Server,
) -> None:
    restarts = "saccade_image_worker_restarts_total"
    before = server.metric(restarts)
    messages = [user(image(png(400, 500)), text_part("what?")) for _ in range(12)]
    with ThreadPoolExecutor(12) as pool, spent(server, DECODED, ENCODED) as so_far:
        answers = [pool.submit(ask, server, message) for message in messages]
        for worker in image_workers(server):
            worker.kill()
        assert all(answer.result()["choices"] for answer in answers)  # a tiny model may say nothing
        assert so_far() == [12, 12]
    assert server.metric(restarts) == before + 1
    server.wait_for_metric("saccade_arena_bytes_in_use", 0)
    assert words(ask(server, user(image(png()))))


@contextmanager
def under_load(server: Server) -> Iterator[list[Future[httpx.Response]]]:
    """Six requests with a new picture each, generating; nothing that a kill could leave behind has
    a name in /dev/shm.
    """
    front = psutil.Process(server.process.pid)
    assert not [
        line
        for process in (front, *front.children(recursive=True))
        for line in named_shared_memory(process)
    ]
    requests = [body([user(image(png()), text_part("go on"))], max_tokens=1200) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asking = [
            pool.submit(_http.post, f"{server.url}/v1/chat/completions", json=each)
            for each in requests
        ]
        server.wait_for_metric("saccade_requests_running", 6)
        yield asking


def test_a_killed_engine_ends_every_request_with_a_typed_error(bare: Server) -> None:
    children = psutil.Process(bare.process.pid).children(recursive=True)
    with under_load(bare) as asking:
        next(child for child in children if "saccade.engine.main" in child.cmdline()).kill()
        for each in asking:
            assert each.result().status_code == 503
            assert each.result().json()["error"]["code"] == "engine_unavailable"
    health = httpx.get(f"{bare.url}/health")
    assert health.status_code == 503
    assert health.json()["reason"] == "the engine process was killed by signal 9"
    assert httpx.get(f"{bare.url}/v1/files").status_code == 200
    assert bare.process.wait(15) == 1, "it ends, so that somebody starts it again"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert left_of(bare) == []


def test_a_killed_front_leaves_no_orphan(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2
    with under_load(server) as asking:
        server.process.kill()
        for each in asking:
            with pytest.raises(httpx.TransportError):
                each.result()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert left_of(server) == []
