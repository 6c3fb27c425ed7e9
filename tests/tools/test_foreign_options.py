"""Options of vLLM, SGLang and llama.cpp after `saccade serve`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from saccade import commands
from saccade.commands import app, is_plain
from saccade.core.errors import ConfigError
from saccade.tools.foreign_options import ENVIRONMENT, OPTIONS, VALUES, translate, unread

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"

PUBLISHED = (
    "--tp 2",
    "--model-path Qwen/Qwen3-VL-8B-Instruct",
    "--trust-remote-code",
    "--enable-multimodal",
    "--enable-cache-report",
    "--stream-interval 300",
    "--max-prefill-tokens 16384",
    "--base-gpu-id 1",
    "--log-level info",
    "--enable-torch-symm-mem",
    "--enable-torch-compile",
    "--page-size 16",
    "--log-requests",
    "--mm-attention-backend fa3",
    "--cuda-graph-max-bs 64",
    "--disable-radix-cache",
    "--cuda-graph-bs 1 2 4 8",
    "--piecewise-cuda-graph-max-tokens 4096",
    "--piecewise-cuda-graph-compiler eager",
    "--kv-cache-dtype fp8_e4m3",
    "--mem-fraction-static 0.8",
    "--context-length 2560",
    "--max-running-requests 128",
    "--chunked-prefill-size 8192",
    "--attention-backend fa3",
)
"""Of the benchmarks that docs/speed.md compares with."""
COMMON = (
    "--tensor-parallel-size 2",
    "-tp 2",
    "--tensor_parallel_size=2",
    "--gpu-memory-utilization 0.9",
    "--max-model-len 8192",
    "--max-num-seqs 64",
    "--max-num-batched-tokens 8192",
    "--limit-mm-per-prompt image=4",
    """--limit-mm-per-prompt '{"image": 4, "video": 0}'""",
    "--dtype half",
    "--quantization awq",
    "--kv-cache-dtype fp8",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--enable-chunked-prefill",
    "--served-model-name a b",
    "--host 0.0.0.0",
    "--port 8001",
    "--api-key secret",
    "--seed 0",
    "--download-dir /models",
    "--tokenizer other/folder",
    "--enable-auto-tool-choice",
    "--tool-call-parser hermes",
    "--reasoning-parser qwen3",
    "--enable-lora",
    "--lora-modules first=/a second=/b",
    "--max-loras 4",
    "--revision main",
    "--load-format dummy",
    "--swap-space 4",
    "--cpu-offload-gb 4",
    "--data-parallel-size 2",
    "--pipeline-parallel-size 2",
    "--speculative-config '{}'",
    "--disable-log-requests",
    "--allowed-local-media-path /tmp",
    "--allowed-media-domains a.example b.example",
    "--mm-processor-kwargs '{}'",
    "--hf-overrides '{}'",
    "--ssl-keyfile key.pem",
    "--root-path /api",
    "--task embed",
    "--block-size 16",
    "--dp-size 2",
    "--schedule-policy lpm",
    "--grammar-backend xgrammar",
    "--random-seed 1",
    "--enable-metrics",
    "--watchdog-timeout 300",
    "--skip-server-warmup",
    "-hf Qwen/Qwen3-VL-2B-Instruct-GGUF",
    "-c 4096",
    "-ngl 99",
    "-np 4",
    "-t 8",
    "--jinja",
)


@pytest.mark.parametrize("typed", (*PUBLISHED, *COMMON))
def test_a_pasted_option_is_understood_or_gets_what_to_type_instead(typed: str) -> None:
    try:
        ours = translate(shlex.split(typed), print)
    except ConfigError as error:
        assert str(error).startswith(f"{typed.split()[0]}: use ") and "{" not in str(error)
    else:
        app.parse_args(["serve", *ours], exit_on_error=False, print_error=False)


def parsed(typed: str) -> dict[str, Any]:
    _, bound, _ = app.parse_args(
        ["serve", *translate(shlex.split(typed), print)], exit_on_error=False, print_error=False
    )
    values: dict[str, Any] = {}
    for value in (*bound.args, *bound.kwargs.values()):
        if isinstance(value, str):
            values["model"] = value
        elif isinstance(value, tuple):
            values["tune"] = value
        else:
            for group in vars(value).values():
                values |= {field.name: getattr(group, field.name) for field in fields(group)}
    return values


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--model-path a/b --tp 2", {"model": "a/b", "tp_size": 2}),
        ("--enable-multimodal a/b -tp=4", {"model": "a/b", "tp_size": 4}),
        ("a/b --max-num-seqs 7 --dtype half", {"max_running_requests": 7, "dtype": "float16"}),
        ("a/b --stream-interval 300", {"model": "a/b"}),
        ("--limit-mm-per-prompt image=4 a/b", {"model": "a/b", "max_images_per_request": 4}),
        ("""--limit-mm-per-prompt '{"image": {"count": 3}}'""", {"max_images_per_request": 3}),
        ("a --lora-modules b=c d=e", {"model": "a", "lora": ("b=c", "d=e")}),
        ("a --served-model-name b c", {"served_model_name": ("b", "c")}),
        (
            "a --page-size 8 --tune load_format=dummy",
            {"tune": ("page_size=8", "load_format=dummy")},
        ),
        ("--kv_cache_dtype=fp8 a", {"model": "a", "kv_cache_dtype": "fp8_e4m3"}),
        ("a --quantization int8 --tp 2", {"quantization": "int8", "tp_size": 2}),
        ("a --enforce-eager", {"disable_cuda_graph": True}),
    ],
)
def test_a_pasted_option_has_its_value(typed: str, expected: Mapping[str, Any]) -> None:
    values = parsed(typed)
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--base-gpu-id 3", "CUDA_VISIBLE_DEVICES=3 saccade serve"),
        ("--base-gpu-id=3 --tp 2", "CUDA_VISIBLE_DEVICES=3 saccade serve"),
        ("--dp", "saccade route"),
        ("--limit-mm-per-prompt audio=1", "only images can be limited"),
        ("--limit-mm-per-prompt nothing", "only images can be limited"),
        ("--tp", "--tp requires a value"),
    ],
)
def test_an_option_without_a_counterpart_says_what_to_use(typed: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        translate(shlex.split(typed), print)


def test_an_unneeded_option_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(["--enable-cache-report", "demo"], print) == ["demo"]
    note = capsys.readouterr().out
    assert note == "--enable-cache-report is not needed: usage always reports cached tokens\n"


@pytest.mark.parametrize(
    "typed",
    ["demo --port 0 --lora a=b --tune page_size=8", "--dtype=float32 demo", "--unknown 3", "-- -c"],
)
def test_our_own_arguments_stay_as_typed(typed: str) -> None:
    assert shlex.join(translate(shlex.split(typed), print)).replace("=", " ") == typed.replace(
        "=", " "
    )


def run(typed: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line."""
    monkeypatch.setattr(sys, "argv", ["saccade", *shlex.split(typed)])
    return commands.run()


def test_a_pasted_command_line_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "4096")
    typed = f"serve --model-path {tmp_path} --tp 1 --enable-multimodal --stream-interval 300"
    assert run(typed, monkeypatch) == 1
    shown = capsys.readouterr()
    assert f"loading {tmp_path}" in shown.out and "config.json" in shown.err
    assert "SGLANG_VLM_CACHE_SIZE_MB is not read: use --embedding-cache-device-mb" in shown.err
    assert "--stream-interval is not needed: each token is sent" in shown.err


def test_an_unknown_option_is_still_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("serve demo --tp 2 --prot 3", monkeypatch)
    assert "Did you mean --port?" in " ".join(capsys.readouterr().err.split())


def test_a_named_template_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve demo --port 0 --chat-template qwen2-vl", monkeypatch) == 1
    assert "omit the option to use the checkpoint's own" in capsys.readouterr().err


def test_other_servers_variables_are_named_only_where_known() -> None:
    assert unread({"SACCADE_API_KEY": "x", "SGLANG_OTHER": "1"}) == []


def test_the_page_shows_every_option() -> None:
    page = PAGE.read_text()
    names = (*OPTIONS, *VALUES, *ENVIRONMENT)
    assert [name for name in names if f"`{name}`" not in page and f"`{name} " not in page] == []


def test_they_are_looked_up_unless_all_options_are_ours_alone() -> None:
    serve = ["serve", "demo"]
    assert is_plain([*serve, "--port", "0", "--threads=1"], {"PATH", "SACCADE_API_KEY"})
    for name in (*OPTIONS, *VALUES):
        assert not is_plain([*serve, name, "1"], {})
    for name in (*ENVIRONMENT, "SACCADE_ENCODER_KEY"):
        assert not is_plain(serve, {name})
    for words in (["--help"], ["--tp-size", "2"], ["--config", "x"], ["--tune", "x=1"], ["--max"]):
        assert not is_plain([*serve, *words], {})
    assert not is_plain(["route", "--port", "0"], {})
