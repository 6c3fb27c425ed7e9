"""One server, several behind `saccade route`, several on Ray Serve: the same to clients.

And what is only of several: an image costs its work once in all of them, and a server that dies
takes nothing along but what it was answering.
"""

from __future__ import annotations

import base64
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from saccade_bench.fixtures.server import routing
from tests.e2e.fleets import Asked, Fleet, ask, chat, chats, outcome, shared_out, start
from tests.e2e.test_serve import PAGE
from tests.fixtures.tiny import picture
from tests.helpers.breadth import broad
from tests.helpers.images import image_part, png_url, text_part, user

pytestmark = pytest.mark.more

ENCODED = "saccade_images_encoded_total"
LENGTH = 32
"""Tokens of an answer."""
RAY = pytest.param(
    "ray",
    marks=[pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")],
)
SLOWLY = [*(pytest.param(way, marks=pytest.mark.slow) for way in ("direct", "routed")), RAY]
quick_direct = pytest.mark.parametrize("way", ["direct", *SLOWLY[1:]], indirect=True)
"""Through a router only in the long run."""
quick_routed = pytest.mark.parametrize("way", [SLOWLY[0], "routed", RAY], indirect=True)
"""That one server keeps to this, tests of its own show, too."""


several = pytest.mark.parametrize("way", ["routed", RAY], indirect=True)


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield start(folder, tmp_path_factory.mktemp("log"), stack)


@pytest.fixture(params=["direct", "routed", RAY])
def way(request: pytest.FixtureRequest) -> str:
    """How servers are asked."""
    return str(request.param)


@pytest.fixture
def behind(way: str, request: pytest.FixtureRequest) -> Fleet:
    """The servers that are asked, or of which one is."""
    found: Fleet = request.getfixturevalue("ray_fleet" if way == "ray" else "fleet")
    return found


@pytest.fixture
def server(behind: Fleet, way: str) -> Asked:
    """What clients see."""
    return behind.direct if way == "direct" else behind.routed


@pytest.fixture
def fresh(way: str) -> int:
    """Added to a seed, it makes an image that was not seen on another way."""
    return 10_000 * ["direct", "routed", "ray"].index(way)


@pytest.fixture
def client(server: Asked) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client


def say(client: openai.OpenAI, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """An answer of a known length."""
    body = {"ignore_eos": True, **options.pop("extra_body", {})}
    return ask(client, messages, **{"max_tokens": LENGTH, "extra_body": body, **options})


# ---- answers


@pytest.mark.slow
def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    messages = [user(image_part(picture(70, 70, seed=5)), text_part("describe"))]
    whole = say(client, messages)
    chunks = list(say(client, messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == LENGTH
    finishes = [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert finishes == ["length"]


@quick_direct
def test_another_picture_of_equal_size_gets_its_own_answer(client: openai.OpenAI) -> None:
    def about(seed: int) -> str:
        return str(
            say(client, [user(image_part(picture(96, 96, seed=seed)), text_part("what is it?"))])
            .choices[0]
            .message.content
        )

    first, second, again = about(201), about(202), about(201)
    assert first == again != second


def test_n_answers_logprobs_and_stop(client: openai.OpenAI) -> None:
    messages = [user(text_part("quick brown"))]
    answers = say(client, messages, n=3, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)
    again = say(client, messages, n=3, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in answers.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    entries = answers.choices[0].logprobs.content
    assert len(entries) == LENGTH
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    whole = say(client, messages).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    stopped = say(client, messages, stop=[stop])
    assert stopped.choices[0].message.content == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the quick", "brown fox"], max_tokens=5, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 10


def test_bad_pictures_are_refused_by_name_and_harm_nobody(client: openai.OpenAI) -> None:
    for url, word in (
        ("data:image/png;base64,AAAA", "format"),
        ("data:text/html;base64,PGh0bWw+PC9odG1sPg==", "HTML"),
        ("http://127.0.0.1:1/x.png", "private"),
        ("ftp://x/y", "URL"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            say(client, [user(text_part("x"), {"type": "image_url", "image_url": {"url": url}})])
        body: Any = caught.value.body
        assert body["param"].startswith("messages[0].content[1]")
        assert word in body["message"]
    assert say(client, [user(text_part("still there?"))]).choices[0].message.content


@quick_direct
@pytest.mark.parametrize("count", broad([100, 500], keep=[100]))
def test_random_requests_each_end_once_and_leave_no_page_behind(
    server: Asked, client: openai.OpenAI, count: int
) -> None:
    rng = random.Random(0)
    pictures = [
        image_part(picture(rng.choice([40, 64, 96]), rng.choice([64, 100, 128]), seed=300 + i))
        for i in range(12)
    ]
    outcomes: list[str] = []
    lock = threading.Lock()

    def one(seed: int) -> None:
        draw = random.Random(seed)
        parts = [draw.choice(pictures) for _ in range(draw.choice([0, 0, 1, 1, 2, 4]))]
        messages = [user(*parts, text_part(draw.choice(["quick", "how many?", "brown fox " * 20])))]
        options: dict[str, Any] = {
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0, 1.0]),
            "seed": seed,
        }
        options["extra_body"] = {
            "ignore_eos": draw.random() < 0.7,
            "cache_salt": draw.choice(["", "", "tenant"]),
        }
        kind = draw.random()
        try:
            if kind < 0.15:  # a client that leaves in the middle
                with say(client, messages, stream=True, **options) as stream:
                    for _ in zip(range(draw.randint(1, 3)), stream):
                        pass
                result = "left"
            elif kind < 0.25:
                say(
                    client,
                    [
                        user(
                            *parts,
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:image/png;base64,aGVsbG8="},
                            },
                        )
                    ],
                    **options,
                )
                result = "bad picture accepted"
            else:
                answer = say(client, messages, n=draw.choice([1, 1, 2]), **options)
                result = ",".join(sorted({choice.finish_reason for choice in answer.choices}))
        except openai.BadRequestError:
            result = "refused"
        with lock:
            outcomes.append(result)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(count)))
    assert len(outcomes) == count
    assert set(outcomes) <= {"left", "refused", "length", "stop", "length,stop"}
    assert outcomes.count("refused") > count // 25
    server.wait_for_metric("saccade_requests_in_flight", 0)
    server.wait_for_metric("saccade_requests_running", 0)
    server.wait_for_metric("saccade_requests_waiting", 0)
    server.wait_for_metric("saccade_kv_pages", 0, owner="sequences")
    server.wait_for_metric("saccade_arena_bytes_in_use", 0)


def test_a_client_that_goes_away_frees_its_request(server: Asked) -> None:
    body = {
        "model": "tiny",
        "messages": [user(text_part("go on"))],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    aborts = server.metric("saccade_requests_total", outcome="abort")
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=30
    ) as response:
        stream = response.iter_bytes()
        next(stream)  # the first words are there long before the last
        server.wait_for_metric("saccade_requests_running", 1)
    server.wait_for_metric("saccade_requests_running", 0)
    server.wait_for_metric("saccade_kv_pages", 0, owner="sequences")
    assert server.metric("saccade_requests_total", outcome="abort") == aborts + 1


# ---- errors, files, responses


@quick_routed
def test_errors_are_the_servers_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'nope' does not exist"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [user(image_part(picture(8, 8, seed=1)))], n=-1)
    assert caught.value.param == "n"
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [user(broken)])
    assert caught.value.param == "messages[0].content[0]"
    url = str(client.base_url)
    bad = httpx.post(f"{url}chat/completions", content=b"{", headers={"x-request-id": "mine"})
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
    assert bad.headers["x-request-id"] == "mine"
    assert httpx.get(f"{url}nowhere").json()["error"]["code"] == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "0" * 48)


@quick_routed
def test_the_anthropic_sdk_is_answered(server: Asked, request: pytest.FixtureRequest) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    request.addfinalizer(client.close)
    data = png_url(picture(64, 64, seed=3)).partition(",")[2]
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    messages: Any = [{"role": "user", "content": content}]
    answer = client.messages.create(model="tiny", max_tokens=4, messages=messages)
    with client.messages.stream(model="tiny", max_tokens=4, messages=messages) as stream:
        assert len(list(stream)) > 2
    assert answer.usage.output_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nope", max_tokens=4, messages=messages)


@quick_routed
def test_an_uploaded_file_is_there_whoever_is_asked(
    server: Asked, client: openai.OpenAI, fresh: int
) -> None:
    pixels = picture(64, 64, seed=400 + fresh)
    data = base64.b64decode(png_url(pixels).partition(",")[2])
    file = client.files.create(file=("a.png", data), purpose="vision")
    part = {"type": "file", "file": {"file_id": file.id}}
    before = server.metric(ENCODED)
    for text in ("what?", "which?", "why?"):
        ask(client, [user(part, text_part(text))])
    inline = image_part(pixels)
    ask(client, [user(inline, text_part("the same?"))])
    assert server.metric(ENCODED) - before == 1, "by its id or by its bytes, an image is one image"
    assert client.files.content(file.id).read() == data
    assert file.id in [each.id for each in client.files.list().data]
    for worker in server.workers:
        assert httpx.get(f"{worker.url}/v1/files/{file.id}").json()["filename"] == "a.png"
    client.files.delete(file.id)
    for url in (str(client.base_url), *(f"{each.url}/v1/" for each in server.workers)):
        assert httpx.get(f"{url}files/{file.id}").status_code == 404
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a.png", b"no image"), purpose="vision")


@quick_routed
def test_a_response_goes_on_where_it_is_kept(client: openai.OpenAI) -> None:
    for letter in "abcd":
        response = client.responses.create(model="tiny", input=letter, max_output_tokens=4)
        for _ in range(3):
            response = client.responses.create(
                model="tiny", input="go on", max_output_tokens=4, previous_response_id=response.id
            )
        assert client.responses.retrieve(response.id).id == response.id
        assert len(client.responses.input_items.list(response.id).data) == 7
        client.responses.delete(response.id)


@quick_direct
def test_the_second_turn_of_a_response_decodes_and_encodes_nothing(
    server: Asked, client: openai.OpenAI, fresh: int
) -> None:
    work = ("saccade_images_decoded_total", ENCODED)
    before = [server.metric(name) for name in work]
    seen = picture(96, 128, seed=77 + fresh)
    part = {"type": "input_image", "image_url": png_url(seen)}
    question: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
    settings: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    create: Any = client.responses.create
    last = create(input=question, **settings)
    assert [server.metric(name) for name in work] == [count + 1 for count in before]
    prompts = [last.usage.input_tokens]
    for turn in range(3):
        last = create(input=f"And {turn}?", previous_response_id=last.id, **settings)
        assert last.usage.input_tokens_details.cached_tokens >= prompts[-1] - PAGE
        prompts.append(last.usage.input_tokens)
    assert [server.metric(name) for name in work] == [count + 1 for count in before]
    by_hand = create(input=list(conversation(client, last.id)), **settings)
    assert by_hand.output_text == last.output_text


def conversation(client: openai.OpenAI, response_id: str) -> Iterator[dict[str, Any]]:
    """All that a response was made of, as the API has it."""
    for item in client.responses.input_items.list(response_id, order="asc"):
        yield item.to_dict()


def test_forced_calls_through_the_sdks_stream_with_images_in_results(
    server: Asked, client: openai.OpenAI
) -> None:
    """A random model calls as it must; each call goes back with an image as its result."""
    look: Any = {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["left", "right"]}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
    messages: list[Any] = [user(image_part(picture(64, 96)), text_part("what?"))]
    encoded = server.metric("saccade_images_encoded_total")
    for turn in range(3):
        with client.chat.completions.stream(
            model=client.models.list().data[0].id,
            messages=messages,
            tools=[look],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=turn,
        ) as stream:
            deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        assert message.tool_calls is not None and len(message.tool_calls) == 1
        call = message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        assert call.function.parsed_arguments["where"] in ("left", "right")  # type: ignore[index]
        assert "".join(each.arguments_delta for each in deltas) == call.function.arguments
        result = [image_part(picture(64, 96, seed=50 + turn))]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    # Three prompts with one, two and three images: each was encoded once.
    assert server.metric("saccade_images_encoded_total") - encoded <= 3


# ---- Anthropic's API


def screenshot(seed: int) -> dict[str, Any]:
    data = png_url(picture(64, 64, 500 + seed)).partition(",")[2]
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }


def transcript(turns: int, seed: int) -> dict[str, Any]:
    """What a coding assistant sends: a marked system list, and calls whose results are screens."""
    mark = {"type": "ephemeral"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Open the settings."}]
    for turn in range(turns):
        use = {"type": "tool_use", "id": f"t{turn}", "name": "click", "input": {}}
        screen = [screenshot(seed + turn)]
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": screen}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    messages[-1]["content"][0]["cache_control"] = mark
    system = [
        {"type": "text", "text": "You use a computer."},
        {"type": "text", "text": "Be careful. " * 5, "cache_control": mark},
    ]
    where = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"name": "click", "description": "Click there.", "input_schema": where}
    return {"model": "tiny", "system": system, "messages": messages, "tools": [tool]}


def in_all(usage: anthropic.types.Usage) -> int:
    """Prompt tokens: found in the cache, computed and now kept by a mark, and others."""
    kept = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + kept


@quick_direct
def test_an_agents_second_turn_costs_what_is_new(server: Asked, fresh: int) -> None:
    """Thirty screens: none is decoded or encoded again, and the pages of the prompt are found."""

    def spent() -> tuple[float, float]:
        names = ("saccade_images_decoded_total", "saccade_images_encoded_total")
        return server.metric(names[0]), server.metric(names[1])

    with anthropic.Anthropic(api_key="x", base_url=server.url, max_retries=0) as client:
        create: Any = client.messages.create
        count: Any = client.messages.count_tokens
        before, asked = spent(), transcript(30, fresh)
        counted = count(**asked).input_tokens
        assert spent() == before
        first = create(**asked, max_tokens=8)
        decoded, encoded = spent()
        assert (decoded - before[0], encoded - before[1]) == (30, 30)
        assert in_all(first.usage) == counted
        asked["messages"] += [
            {"role": "assistant", "content": first.content or "Done."},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]
        with client.messages.stream(**asked, max_tokens=8) as stream:
            second = stream.get_final_message()
        assert spent() == (decoded, encoded)
        recounted = count(**asked).input_tokens
    usage = second.usage
    assert recounted == in_all(usage)
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens >= counted - 2 * 16  # but for a page that is not whole


# ---- what a fleet is worth


def test_every_image_of_every_chat_is_encoded_once_in_the_whole_fleet(fleet: Fleet) -> None:
    before = fleet.encodes
    chats(fleet.router.url, shared_out(fleet, 4, seed=1000))
    encoded = [now - then for now, then in zip(fleet.encodes, before, strict=True)]
    assert encoded == [4, 4]


def test_a_large_body_goes_through_and_one_that_is_too_large_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    filler = {"user": "x" * 3_000_000}
    with fleet.client() as client:
        assert ask(client, [user(text_part("what?"))], extra_body=filler).choices
    with routing(fleet.workers, tmp_path, "--max-body-mb", "1", "--max-requests", "1") as small:
        url = f"{small.url}/v1/chat/completions"
        refused = httpx.post(url, json={"messages": [], **filler})
        assert refused.status_code == 413 and "--max-body-mb" in refused.json()["error"]["message"]
        with httpx.stream("POST", url, content=iter([b"{"] + [b" " * 100_000] * 20)) as streamed:
            assert streamed.status_code == 413
        with socket.create_connection(("127.0.0.1", httpx.URL(small.url).port or 0)) as slow:
            slow.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 9\r\n\r\n"
            )
            time.sleep(0.3)
            assert httpx.post(url, json={}).status_code == 400, "who sends slowly has no place"
        assert httpx.get(f"{small.url}/health").is_success


@several
def test_health_and_metrics_are_the_routers_own(behind: Fleet) -> None:
    health = httpx.get(f"{behind.router.url}/health").json()
    assert [each["url"] for each in health["workers"]] == [each.url for each in behind.workers]
    assert {each["status"] for each in health["workers"]} == {"ready"} == {health["status"]}
    told = httpx.get(f"{behind.router.url}/metrics").text
    assert "saccade_route_rank_seconds_bucket" in told and "saccade_ttft" not in told
    assert behind.router.metric("saccade_request_bytes_buffered") == 0


@several
def test_a_command_to_forget_reaches_every_server(behind: Fleet) -> None:
    before = sum(behind.encodes)
    images = [picture(64, 64, seed=300 + number) for number in range(4)]
    for _ in range(2):
        chats(behind.router.url, images, rounds=1)
        assert httpx.post(f"{behind.router.url}/flush_cache").is_success
    assert sum(behind.encodes) - before == 8


# ---- death; the last test, for it leaves one server


def test_a_server_that_is_killed_takes_nothing_along_but_what_it_was_answering(
    fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    client, doomed = fleet.client(), fleet.workers[-1]
    request.addfinalizer(client.close)
    family = psutil.Process(doomed.process.pid).children(recursive=True)
    deaths: list[float] = []
    images = shared_out(fleet, 5, seed=2000)
    began = [chat(client, pixels, rounds=1) for pixels in images[:4]]
    with ThreadPoolExecutor(10) as pool:
        asking = [
            pool.submit(outcome, client, pixels, number // 2 % 2 == 0, deaths)
            for number, pixels in enumerate(images)
        ]
        deadline = time.monotonic() + 20
        while not doomed.metric("saccade_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        deaths.append(time.monotonic())
        doomed.process.kill()
        ends = [each.result(timeout=60) for each in asking]
    assert ends.count("answer") >= 1
    assert {*ends[2::4], *ends[3::4]} == {"answer"}, "what had not begun is answered elsewhere"
    for messages in began:
        assert ask(client, messages).choices
    assert not psutil.wait_procs(family, timeout=10)[1]
    states = httpx.get(f"{fleet.router.url}/health").json()["workers"]
    assert [each["status"] for each in states] == ["ready", "down"]
