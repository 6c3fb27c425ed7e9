from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.core.errors import ConfigError
from saccade_bench.options import ProbeOptions, TargetOptions
from saccade_bench.probe import ProbeStep, plot, probe, verdicts
from tests.tools.server import IMAGE_TOKENS, Json, Script, ScriptedServer, pictures


def run(server: ScriptedServer, **options: Any) -> list[ProbeStep]:
    return probe(
        TargetOptions(base_url=server.url, timeout=10),
        ProbeOptions(image_content="blank", quiet=True, **options),
    )


def refuse_from(limit: int) -> Script:
    def refuse(number: int, body: Json) -> int | None:
        return 413 if len(pictures(body)) >= limit else None

    return Script(refuse=refuse)


def test_each_resolution_climbs_to_its_first_failure(server: ScriptedServer) -> None:
    server.script = refuse_from(5)
    steps = run(server, resolutions=("32x32", "64x32"), max_images=20)
    assert [(step.resolution, step.images) for step in steps] == [
        (size, count) for size in ("32x32", "64x32") for count in range(1, 6)
    ]
    assert [step.failure.kind if step.failure else None for step in steps] == [
        None,
        None,
        None,
        None,
        "HTTP 413",
    ] * 2
    assert verdicts(steps)[0].startswith("32x32: 4 pictures in one request (TTFT ")
    assert "5 fail: HTTP 413" in verdicts(steps)[0] and "refused by script" in verdicts(steps)[0]


def test_without_a_failure_it_ends_at_the_most_pictures_asked_for(server: ScriptedServer) -> None:
    steps = run(server, resolutions=("32x32",), max_images=10, step=4)
    assert [step.images for step in steps] == [1, 4, 8, 10]
    assert verdicts(steps)[0].endswith("no failure up to there")
    assert [(step.prompt_tokens or 0) // IMAGE_TOKENS for step in steps] == [1, 4, 8, 10]


def test_no_picture_is_ever_sent_twice(server: ScriptedServer) -> None:
    run(server, resolutions=("32x32",), max_images=6)
    sent = [url for body in server.seen.streamed for url in pictures(body)]
    assert len(sent) == len(set(sent)) == 1 + 21  # a warm-up request, then 1 to 6 pictures


def test_every_request_is_kept_and_drawn(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = refuse_from(3)
    lines, picture = tmp_path / "probe.jsonl", tmp_path / "probe.png"
    steps = run(
        server, resolutions=("32x32", "48x32"), max_images=8, output_file=lines, plot=picture
    )
    kept = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(step["resolution"], step["images"], bool(step["failure"])) for step in kept] == [
        (size, count, count == 3) for size in ("32x32", "48x32") for count in (1, 2, 3)
    ]
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 800
    assert len(plot(steps)) > 5000


def test_memory_is_that_of_the_process_that_listens(server: ScriptedServer) -> None:
    """The scripted server runs in this process."""
    memory = run(server, resolutions=("32x32",), max_images=1)[0].memory
    assert memory is not None
    assert 50e6 < memory < 4e9, f"of process {os.getpid()}"


def test_memory_is_read_from_metrics_where_the_process_cannot_be_seen(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade_bench.probe._resident", lambda port: None)
    assert run(server, resolutions=("32x32",), max_images=1)[0].memory == 150_000_000


def test_a_probe_that_cannot_begin_shows_no_table(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--resolutions 12"):
        probe(TargetOptions(base_url=server.url), ProbeOptions(resolutions=("32x32", "12")))
    with pytest.raises(ConfigError, match="is the server running"):
        probe(TargetOptions(base_url="http://127.0.0.1:1"), ProbeOptions())
    assert capsys.readouterr().out == ""
    assert server.seen.bodies == []


def test_the_plot_is_a_picture_even_when_nothing_worked(server: ScriptedServer) -> None:
    server.script = refuse_from(1)
    steps = run(server, resolutions=("32x32",), max_images=4)
    assert len(steps) == 1
    assert verdicts(steps)[0].startswith("32x32: not even one picture; 1 fail: HTTP 413")
    with Image.open(io.BytesIO(plot(steps))) as image:
        image.load()
