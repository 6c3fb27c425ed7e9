"""The commands behind published figures: parsed unchanged, and run against a server."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from saccade.core.errors import ConfigError
from saccade_bench import cli
from saccade_bench.load.datasets import Calibration, Recipe, build, parse_limit, warmup
from saccade_bench.load.serve import Bench, serve
from saccade_bench.options import (
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    OutputOptions,
    PastedOptions,
    PublishedOptions,
    RandomMM,
    TargetOptions,
    TextOptions,
)
from saccade_bench.published.rows import ROWS, PublishedRow
from saccade_bench.published.run import (
    CommandRun,
    PublishedResult,
    chosen,
    command_of,
    lines,
    pairs,
    published,
    run_row,
)
from tests.tools.server import Script, ScriptedServer, pictures, texts

SERVED = [row for row in ROWS if " bench serve " in row.command or "bench_serving" in row.command]
ROOT = str(Path(__file__).parents[3])
PROGRAM = """
import sys
from itertools import pairwise
sys.path.insert(0, {root!r})
from tests.tools.server import Script, ScriptedServer
off = "--tune" in sys.argv
server = ScriptedServer(Script(answer=lambda body: ["off" if off and {differs} else "on"]))
server._server.config.port = int(sys.argv[1])
server._server.run()
"""


def words_of(row: PublishedRow) -> dict[str, str]:
    """Return the options of a published command with their values."""
    words = shlex.split(row.command)
    return {a: b for a, b in pairwise(words) if a.startswith("--") and not b.startswith("--")}


@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_every_option_of_a_published_command_has_its_value(row: PublishedRow) -> None:
    words = command_of(row, PublishedOptions(mmmu="questions"))
    groups = [*cli.parsed(words).values()]
    for option, value in words_of(row).items():
        if option in ("--port", "--model", "--seed"):
            continue
        name = option[2:].replace("-", "_")
        (found,) = (getattr(group, name) for group in groups if hasattr(group, name))
        assert str(found) in (value, f"{value}.0"), option


def test_an_option_that_no_client_has_is_refused() -> None:
    with pytest.raises(Exception, match="random-prefx-len"):
        cli.parsed(["bench", "serve", "--random-prefx-len", "5"])


def test_host_and_port_name_the_server_as_other_clients_have_it() -> None:
    assert TargetOptions(port=30000).url == "http://127.0.0.1:30000"
    assert TargetOptions(host="h").url == "http://h:8000"
    assert TargetOptions(base_url="http://h:1/v1").url == "http://h:1/v1"


def recipe(symmetric: bool = False, **text: float) -> Recipe:
    return Recipe(
        DatasetOptions(),
        LoadOptions(num_prompts=40),
        ImageOptions(image_resolution="16x16"),
        TextOptions(**text),  # type: ignore[arg-type]
        RandomMM(),
        Calibration(),
        symmetric,
    )


def test_a_prefix_is_the_same_in_all_questions_and_in_the_warm_up() -> None:
    made = recipe(random_prefix_len=100, random_input_len=40)
    questions = [session.turns[0].parts for session in (*build(made), *warmup(made))]
    assert all(isinstance(parts[0], str) for parts in questions), "text comes before images"
    firsts = {str(parts[0])[:390] for parts in questions}
    assert len(firsts) == 1 and len({str(parts[0]) for parts in questions}) == 41
    assert all(abs(0.25 * len(str(parts[0])) - 140) < 5 for parts in questions)


def test_ranges_go_one_way_or_both_as_the_client_has_it() -> None:
    one = {session.turns[0].max_tokens for session in build(recipe(random_range_ratio=0.5))}
    both = {
        session.turns[0].max_tokens
        for session in build(recipe(symmetric=True, random_range_ratio=0.5))
    }
    assert min(one) >= 64 and max(one) <= 128
    assert min(both) >= 64 and max(both) > 128


@pytest.mark.parametrize(("text", "limit"), [("3", 3), ('{"image": 2, "video": 0}', 2), ("{}", 0)])
def test_a_limit_of_images_is_a_number_or_json(text: str, limit: int) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["x", "-1", '{"image": "a"}'])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--random-mm-limit-mm-per-prompt"):
        parse_limit(text)


def served(server: ScriptedServer, **output: str) -> Bench:
    return Bench(
        target=TargetOptions(base_url=server.url),
        load=LoadOptions(num_prompts=2, warmup_requests=0),
        images=ImageOptions(image_resolution="16x16"),
        output=OutputOptions(**output),  # type: ignore[arg-type]
        pasted=PastedOptions(backend="openai-chat"),
    )


def test_answers_are_counted_again_by_a_server_that_counts(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(answer=lambda body: ["two ", "words"])
    assert serve(served(server)).summary.retokenized is None
    server.script.tokenizes = True
    assert serve(served(server)).summary.retokenized == 4
    assert "(retokenized)" in capsys.readouterr().out


def test_only_the_wanted_latencies_are_printed(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(served(server, percentile_metrics="ttft,e2el"))
    printed = capsys.readouterr().out
    assert "TTFT" in printed and "E2E" in printed
    assert "TPOT" not in printed and "ITL" not in printed
    with pytest.raises(ConfigError, match="--percentile-metrics tfft"):
        serve(served(server, percentile_metrics="tfft"))


@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_a_published_command_runs_against_a_server(
    server: ScriptedServer, row: PublishedRow
) -> None:
    target = TargetOptions(base_url=server.url)
    found = run_row(row, target, PublishedOptions(quick=True), cli.parsed)
    if row.data:
        assert found.error == f"needs --{row.data} PATH" and not server.seen.streamed
        return
    assert not found.error and found.texts
    assert any(metric in found.figures for metric in row.figures) or row.name.startswith("chat")
    assert all(pictures(body) for body in server.seen.streamed)


def test_a_server_that_answers_nothing_is_an_error_of_each_row(server: ScriptedServer) -> None:
    server.script = Script(refuse=lambda number, body: 503)
    (found,) = published(
        TargetOptions(base_url=server.url),
        PublishedOptions(only=("vit-graphs",), quick=True),
        cli.parsed,
    )
    assert found.on.error.startswith("no request was answered") and not found.on.figures


def test_the_table_is_also_data(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = PublishedOptions(only=("position-cache",), quick=True, json=True)
    published(TargetOptions(base_url=server.url), options, cli.parsed)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["published"]["mean TTFT (ms)"] == {"before": 1951, "after": 1927}
    assert row["on"]["figures"]["requests (1/s)"] > 0 and row["off"] is None


def test_a_row_that_is_not_known_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"--only vit-graph: .*vit-graphs"):
        chosen(("vit-graph",))


@pytest.mark.parametrize(("differs", "same"), [(False, 3), (True, 0)])
def test_each_command_runs_with_its_mechanism_and_without(
    tmp_path: Path, differs: bool, same: int
) -> None:
    program = tmp_path / "server.py"
    program.write_text(PROGRAM.format(root=ROOT, differs=differs))
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(program))} {{port}}"
    reported: list[tuple[str, str]] = []
    rows = chosen(("vit-graphs", "hash-off-scheduler"))
    graphs, hashed = pairs(
        rows,
        command,
        PublishedOptions(quick=True, start_timeout=60),
        cli.parsed,
        tmp_path,
        lambda row, label, run: reported.append((row.name, label)),
    )
    assert reported == [("vit-graphs", "on"), ("hash-off-scheduler", "on"), ("vit-graphs", "off")]
    assert graphs.same == same and graphs.off is not None and graphs.off.cpu is not None
    assert hashed.off is None and hashed.same is None


ENCODED = "saccade_images_encoded_total"


def test_a_line_has_both_figures_and_their_ratio() -> None:
    row = chosen(("vit-graphs",))[0]
    on, off = (
        CommandRun({"requests (1/s)": rate}, {ENCODED: count}, ("a",), 1.0)
        for rate, count in ((3.0, 2), (2.0, 4))
    )
    found = [*lines(PublishedResult(row, on, off))]
    assert found[0] == ("requests (1/s)", "22.6 -> 27.6", "3", "2", "1.500")
    assert found[1] == ("mean TTFT (ms)", "1384.5 -> 1120.7", "-", "-", "")
    assert ("encoded", "", "2", "4", "0.500") in found
    assert ("same answers", "", "1 of 1", "", "") in found


def test_texts_reach_the_server_in_order(server: ScriptedServer) -> None:
    """vLLM's client sends text before images, so that prompts have a common prefix."""
    (row,) = chosen(("hash-off-scheduler",))
    assert not run_row(
        row, TargetOptions(base_url=server.url), PublishedOptions(quick=True), cli.parsed
    ).error
    bodies = [body for body in server.seen.streamed if pictures(body)]
    assert len({texts(body)[:200] for body in bodies}) == 1
    assert len({texts(body) for body in bodies}) == len(bodies)
