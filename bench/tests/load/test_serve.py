"""The load generator against a real server on loopback: the requests that arrive, and the reported
results.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from saccade.core.errors import ConfigError
from saccade_bench.eval.sampling import HttpSampler
from saccade_bench.load.client import BenchClient, Stream
from saccade_bench.load.datasets import Calibration
from saccade_bench.load.journal import read_runs
from saccade_bench.load.load import arrival_times
from saccade_bench.load.measure import Distribution
from saccade_bench.load.serve import Bench, Measured, calibrate, serve
from saccade_bench.load.table import notes, render
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    TargetOptions,
    TextOptions,
)
from tests.tools.server import Json, Script, ScriptedServer, texts

TINY = ImageOptions(image_resolution="32x32", image_content="blank")


def bench(
    server: ScriptedServer,
    prompts: int,
    concurrency: int | None = None,
    data: DatasetOptions | None = None,
    **output: object,
) -> Bench:
    return Bench(
        target=TargetOptions(base_url=server.url, timeout=20),
        load=LoadOptions(num_prompts=prompts, max_concurrency=concurrency, warmup_requests=0),
        data=data or DatasetOptions(),
        images=TINY,
        text=TextOptions(random_input_len=20, random_output_len=3),
        output=OutputOptions(quiet=True, **output),  # type: ignore[arg-type]
    )


def run(wanted: Bench) -> Measured:
    return serve(wanted)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (None, 12)])
def test_exactly_the_asked_requests_arrive_with_no_more_side_by_side(
    server: ScriptedServer, concurrency: int | None, most: int
) -> None:
    server.script = Script(first=0.05)
    summary = run(bench(server, 12, concurrency)).summary
    assert len(server.seen.streamed) == summary.sent == summary.completed == 12
    assert server.seen.most_running == summary.throughput.peak_requests == most
    assert len({json.dumps(body["messages"]) for body in server.seen.streamed}) == 12
    assert summary.tokens.output == 36
    assert summary.tokens.cached == 60
    assert summary.latency.ttft.n == 12
    assert summary.latency.itl.n == 24
    assert summary.failures == {}


def test_warm_up_requests_are_not_counted(server: ScriptedServer) -> None:
    wanted = bench(server, 4)
    summary = run(replace(wanted, load=replace(wanted.load, warmup_requests=3))).summary
    assert len(server.seen.streamed) == 7
    assert summary.sent == 4


def test_a_chat_sends_back_the_answers_it_got(server: ScriptedServer) -> None:
    server.script = Script(answer=lambda body: ["so ", f"many: {len(body['messages'])}"])
    summary = run(
        bench(server, 2, 2, DatasetOptions(dataset_name="multiturn-image", rounds=3))
    ).summary
    longest = [body for body in server.seen.streamed if len(body["messages"]) == 5]
    assert len(longest) == 2
    assert [
        message["content"] for message in longest[0]["messages"] if message["role"] == "assistant"
    ] == ["so many: 1", "so many: 3"]
    assert [(line.number, line.n, line.images) for line in summary.rounds] == [
        (1, 2, 1.0),
        (2, 2, 2.0),
        (3, 2, 3.0),
    ]
    assert (summary.images, summary.images_seen) == (12, 6)


def test_failures_are_counted_by_kind_and_kept_out_of_the_figures(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: {1: 429, 4: 500, 5: 500}.get(number))
    summary = run(bench(server, 8, 1)).summary
    assert summary.failures == {"HTTP 429": 1, "HTTP 500": 2}
    assert (summary.sent, summary.completed, summary.latency.e2e.n, summary.tokens.output) == (
        8,
        5,
        5,
        15,
    )
    assert notes(summary)[0].startswith("Failed: 1 x HTTP 429, 2 x HTTP 500.")
    assert notes(summary)[1:3] == ["HTTP 429: refused by script", "HTTP 500: refused by script"]


def test_where_nothing_was_answered_there_are_no_figures(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 400)
    console = Console(width=120, file=io.StringIO())
    console.print(render(run(bench(server, 2)).summary, "title"))
    lines = [
        "title",
        "Failed: 2 x HTTP 400. Not one request was answered.",
        "HTTP 400: refused by script",
    ]
    assert console.file.getvalue().splitlines()[:3] == lines  # type: ignore[attr-defined]
    assert "TTFT" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("cached", "told"), [(5, False), (60, True)])
def test_pictures_that_an_earlier_run_has_sent_are_noticed(
    server: ScriptedServer, cached: int, told: bool
) -> None:
    """The server reports cached tokens of prompts that this run had not sent before."""
    server.script = Script(cached=cached)
    summary = run(
        bench(server, 4, 1, DatasetOptions(dataset_name="multiturn-image", rounds=2))
    ).summary
    first = summary.rounds[0]
    assert summary.tokens.cached_unsent == pytest.approx(cached / first.prompt)
    assert any("another --seed" in note for note in notes(summary)) is told
    assert not any("another --seed" in note for note in notes(summary, drawn=False))


def test_text_alone_says_nothing_about_pictures(server: ScriptedServer) -> None:
    wanted = replace(bench(server, 2), images=replace(TINY, image_count=0))
    assert run(wanted).summary.tokens.cached_unsent is None


def test_a_chat_ends_with_its_first_failure(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 400 if number == 1 else None)
    summary = run(
        bench(server, 1, 1, DatasetOptions(dataset_name="multiturn-image", rounds=4))
    ).summary
    assert len(server.seen.streamed) == summary.sent == 2
    assert summary.failures == {"HTTP 400": 1, "not sent": 2}


def test_a_stream_that_breaks_off_is_a_failure(server: ScriptedServer) -> None:
    server.script = Script(break_after=2)
    assert run(bench(server, 3)).summary.failures == {"broken stream": 3}


def test_a_request_that_takes_too_long_is_a_failure(server: ScriptedServer) -> None:
    server.script = Script(first=5.0)
    wanted = bench(server, 2)
    assert run(replace(wanted, target=replace(wanted.target, timeout=0.1))).summary.failures == {
        "timeout": 2
    }


def test_a_server_that_goes_away_is_a_failure_and_one_that_is_not_there_an_error() -> None:
    nowhere = TargetOptions(base_url="http://127.0.0.1:1", model="m")
    summary = serve(
        Bench(
            target=nowhere,
            load=LoadOptions(num_prompts=2, warmup_requests=0),
            images=TINY,
            output=OutputOptions(quiet=True),
        )
    ).summary
    assert summary.failures == {"connection": 2}
    assert summary.examples == {"connection": "connection refused"}
    with pytest.raises(
        ConfigError, match=r"http://127\.0\.0\.1:1 \(connection refused\): is the server running"
    ):
        serve(Bench(target=replace(nowhere, model=None), output=OutputOptions(quiet=True)))


def test_a_kept_connection_that_ends_without_a_word_is_replaced_once() -> None:
    """llama.cpp's server closes connections like this. If a new connection is closed too, the
    request fails.
    """
    event = {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    requests: list[int] = []
    gone = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for before in range(2):
            sent = await reader.readuntil(b"\r\n\r\n")
            length = int(sent.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            requests.append(before)
            if before or gone:
                break
            writer.write(head % len(stream) + stream)
        writer.close()

    async def ask() -> list[str]:
        nonlocal gone
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, BenchClient(TargetOptions(base_url=f"http://{host}:{port}")) as client:
            replies = [await client.stream(b"{}") for _ in range(3)]
            gone = True
            replies.append(await client.stream(b"{}"))
        return [each.text or (each.failure.kind if each.failure else "") for each in replies]

    assert asyncio.run(ask()) == ["yes", "yes", "yes", "connection"]
    assert requests == [0, 1, 0, 1, 0, 1, 0]


def test_a_server_that_wants_a_key_is_told_from_one_that_is_not_there(
    server: ScriptedServer,
) -> None:
    server.script = Script(key="secret")
    wanted = bench(server, 1)
    with pytest.raises(ConfigError, match=r"no key .--api-key KEY.") as caught:
        run(wanted)
    assert "running" not in str(caught.value)
    with pytest.raises(ConfigError, match="--api-key KEY"):
        HttpSampler.connect(server.url, None, {}, 4, {}, 10)
    assert (
        run(replace(wanted, target=replace(wanted.target, api_key="secret"))).summary.completed == 1
    )


def test_a_server_without_usage_is_counted_by_its_events(server: ScriptedServer) -> None:
    server.script = Script(usage=False)
    summary = run(bench(server, 2)).summary
    assert (summary.tokens.prompt, summary.tokens.output, summary.tokens.cached) == (0, 6, None)


def test_vision_tokens_are_what_the_text_leaves_of_the_prompt(server: ScriptedServer) -> None:
    """The scripted server counts 50 tokens for an image and a quarter of a token for a letter."""
    measured = run(bench(server, 10))
    assert measured.calibration.per_char == pytest.approx(0.25, abs=0.005)
    assert not measured.summary.tokens.vision_known
    assert abs(measured.summary.tokens.vision - 10 * 50) <= 10


def test_questions_have_the_asked_length_by_this_servers_count(server: ScriptedServer) -> None:
    run(bench(server, 10))
    asked = [len(texts(body)) / 4 for body in server.seen.streamed]
    assert abs(sum(asked) / 10 - 20) < 3


def test_the_same_command_sends_the_same_bytes(server: ScriptedServer) -> None:
    for _ in range(2):
        run(bench(server, 5, 1, DatasetOptions(dataset_name="repeat")))
    assert server.seen.streamed[:5] == server.seen.streamed[5:]


def test_headers_key_and_extra_fields_reach_the_server_and_the_key_no_file(
    server: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    target = TargetOptions(
        base_url=server.url + "/v1/",
        api_key="secret-key",
        header=("X-Team=blue",),
        extra_request_body='{"top_k": 3}',
    )
    serve(
        Bench(
            target=target,
            load=LoadOptions(num_prompts=1),
            images=TINY,
            output=OutputOptions(quiet=True, output_file=path, trace=True),
        )
    )
    seen, body = server.seen.headers[-1], server.seen.streamed[-1]
    assert (seen["authorization"], seen["x-team"]) == ("Bearer secret-key", "blue")
    assert (body["top_k"], body["saccade"]) == (3, {"trace": True})
    assert "secret-key" not in path.read_text() and "blue" not in path.read_text()


def test_runs_are_read_back_as_they_were_written(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "runs.jsonl"
    server.script = Script(refuse=lambda number, body: 429 if number == 0 else None)
    first = run(bench(server, 3, 1, output_file=path, label="A", save_text=True))
    run(bench(server, 2, 1, output_file=path, label="B"))
    runs = list(read_runs(path))
    assert [(saved.label, len(saved.requests)) for saved in runs] == [("A", 3), ("B", 2)]
    assert [request["failure"] and request["failure"]["kind"] for request in runs[0].requests] == [
        "HTTP 429",
        None,
        None,
    ]
    assert runs[0].requests[1]["text"] == "toktoktok"
    assert runs[0].summary["latency"]["ttft"]["mean"] == pytest.approx(
        first.summary.latency.ttft.mean
    )
    assert runs[0].options["request_rate"] == "inf"
    assert np.mean([request["ttft"] for request in runs[0].requests[1:]]) == pytest.approx(
        first.summary.latency.ttft.mean, abs=0.001
    )


def test_picture_outcomes_are_counted_where_the_answers_carry_them(server: ScriptedServer) -> None:
    server.script = Script(trace={"images": [{"found": "kv"}, {"found": "embedding"}]})
    assert run(bench(server, 3)).summary.outcomes == {"kv": 3, "embedding": 3}


def test_answers_are_scored_where_the_right_text_is_known(server: ScriptedServer) -> None:
    server.script = Script(answer=lambda body: ["no idea"])
    measured = run(bench(server, 4, data=DatasetOptions(dataset_name="ocr")))
    assert measured.summary.accuracy is not None
    assert (measured.summary.accuracy.n, measured.summary.accuracy.score) == (4, 0.0)


def test_goodput_counts_only_requests_within_every_bound(server: ScriptedServer) -> None:
    def answer(body: Json) -> list[str]:
        return ["x"]

    server.script = Script(answer=answer, first=0.05)
    loose = run(bench(server, 4, goodput=("ttft:10000", "e2el:10000"))).summary.throughput
    assert loose.goodput == pytest.approx(loose.requests)
    assert run(bench(server, 4, goodput=("ttft:10000", "e2el:1"))).summary.throughput.goodput == 0.0
    with pytest.raises(ConfigError, match="--goodput speed:1"):
        run(bench(server, 1, goodput=("speed:1",)))


def test_percentiles_are_numpys() -> None:
    values = [float(value) for value in np.random.default_rng(3).gamma(2, 50, size=997)]
    found = Distribution.of(values)
    assert (found.median, found.p90, found.p95, found.p99) == tuple(
        np.percentile(values, [50, 90, 95, 99])
    )
    assert (found.n, found.mean, found.max) == (997, np.mean(values), max(values))
    assert math.isnan(Distribution.of([]).p99)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness: float, variation: float) -> None:
    times = arrival_times(LoadOptions(request_rate=5.0, burstiness=burstiness, seed=4), 20_001)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert (
        times == arrival_times(LoadOptions(request_rate=5.0, burstiness=burstiness, seed=4), 20_001)
    ).all()
    assert not arrival_times(LoadOptions(), 7).any()


def test_events_may_be_cut_anywhere() -> None:
    events = (
        b'data: {"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\r\n\r\n',
        b": ping\n\n",
        b'data: {"choices":[{"delta":{"reasoning":"r"},"finish_reason":"stop"}]}\n\n',
        b"data: "
        b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":null}}\n\n',
        b"data: [DONE]\n\n",
    )
    data = b"".join(events)
    for size in (1, 2, 7, len(data)):
        stream = Stream()
        for start in range(0, len(data), size):
            stream.feed(data[start : start + size], start)
        assert ("".join(stream.pieces), len(stream.arrivals), stream.finish, stream.ended) == (
            "hé",
            2,
            "stop",
            True,
        )
        assert (stream.usage.prompt, stream.usage.completion, stream.usage.cached) == (9, 2, None)
        assert stream.failure is None


def test_an_error_inside_a_stream_is_a_failure() -> None:
    stream = Stream()
    stream.feed(b'data: {"error": {"message": "engine died"}}\n\n', 0.0)
    assert (
        stream.failure is not None
        and stream.failure.kind == "error in stream"
        and "engine died" in stream.failure.message
    )


def test_a_server_that_counts_nothing_leaves_the_usual_guess(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 400)

    async def measure() -> Calibration:
        async with BenchClient(TargetOptions(base_url=server.url)) as client:
            return await calibrate(client, "m")

    assert asyncio.run(measure()) == Calibration(10.0, 0.25)


def test_the_table_shows_every_figure_of_the_run(server: ScriptedServer) -> None:
    console = Console(width=120, file=io.StringIO())
    summary = run(
        bench(
            server,
            2,
            1,
            DatasetOptions(dataset_name="multiturn-image", rounds=2),
            goodput=("ttft:1000",),
        )
    ).summary
    console.print(render(summary, "title"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    wanted = [
        "title",
        "4 / 4",
        "Goodput",
        "E2E",
        "TTFT",
        "TPOT",
        "ITL",
        "sent late",
        "loop delay",
        "Peak concurrent",
        "Cached input tokens",
    ]
    assert not [word for word in wanted if word not in text]
    assert Counter(text.split())["round"] == 1


def test_gaps_of_text_beside_images_are_told_from_gaps_without(server: ScriptedServer) -> None:
    server.script = Script(between=0.02)
    data = DatasetOptions(dataset_name="text-beside-images", text_streams=2, image_every=0.2)
    wanted = bench(server, 3, data=data)
    wanted = replace(wanted, text=replace(wanted.text, random_output_len=60))
    beside = run(wanted).summary.beside
    assert beside is not None
    assert beside.alone.n + beside.images.n == 2 * 59
    assert 0 < beside.images.n < beside.alone.n
    streamed = server.seen.streamed
    assert sorted(body["max_tokens"] for body in streamed) == [8, 8, 8, 60, 60]
    assert run(bench(server, 3)).summary.beside is None


def test_clips_are_asked_about_one_by_one_and_the_servers_work_is_told(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((3, 7))

    async def metrics(self: BenchClient, path: str) -> str:
        return f"# HELP x\nsaccade_images_encoded_total {next(counts)}\nother 5\n"

    monkeypatch.setattr(BenchClient, "text", metrics)
    data = DatasetOptions(dataset_name="video", rounds=3)
    measured = run(bench(server, 1, 1, data))
    assert [len(body["messages"]) for body in server.seen.streamed] == [1, 1, 1]
    assert [(line.number, line.images) for line in measured.summary.rounds] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    assert measured.work == {"saccade_images_encoded_total": 4}
