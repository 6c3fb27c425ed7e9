"""`saccade prove` finds the errors that a test server has, and none in Saccade.

The errors are implemented by `tests/tools/faulty.py`, in front of a real server that reads the
images.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from saccade.core.model_folder import DEMO
from saccade.families.registry import load_spec
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.prove import pictures
from saccade_bench.prove.cases import CASES
from saccade_bench.prove.client import JudgedAnswer
from saccade_bench.prove.cold import distance
from saccade_bench.prove.options import ProveError, ProveOptions
from saccade_bench.prove.run import Proof, ProvedServer, prove
from tests.fixtures.tiny import make_checkpoint
from tests.tools.faulty import (
    RESTART,
    Fault,
    as_stored,
    by_beginning,
    by_blocks,
    by_bytes,
    by_crc,
    by_first_tiles,
    by_samples,
    by_short_hash,
    by_size,
    faulty,
    few_bits,
    pixels_of,
    without_last_byte,
    without_palette,
    without_size,
)

SEED = 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("prove"), "--allow-private-media") as found:
        yield found


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model with an adapter of its first layer's queries."""
    logs, folder = tmp_path_factory.mktemp("adapted"), tmp_path_factory.mktemp("adapter")
    spec = load_spec(DEMO)
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_"
    down = torch.full((1, spec.hidden_size), 0.02)
    tensors = {
        f"{name}A.weight": down,
        f"{name}B.weight": torch.full((spec.cuts.heads * 64, 1), 0.02),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with serving("demo", logs, "--lora", f"other={folder}") as found:
        yield found


def try_on(
    url: str,
    *cases: str,
    images: int = 20,
    output: Path | None = None,
    cold: str | None = None,
    restart: str = "",
) -> Proof:
    options = ProveOptions(
        cases, images, seed=SEED, cold_url=cold, restart_command=restart, output_file=output
    )
    return prove(ProvedServer(url), options)


def test_nothing_is_found_in_ours(server: Server, tmp_path: Path) -> None:
    proof = try_on(server.url, output=tmp_path / "proof.json")
    assert not proof.mixed_up
    verdicts = {name: each.verdict for name, each in proof.findings.items()}
    assert {name for name, each in verdicts.items() if each == "not judged"} <= {
        "video",
        "adapter",
        "restart",
    }
    assert json.loads((tmp_path / "proof.json").read_text())["findings"].keys() == verdicts.keys()


PLANTED: list[tuple[str, Fault, bool]] = [
    ("plain", Fault(by_size), False),
    ("palette", Fault(without_palette), False),
    ("alpha", Fault(as_stored), False),
    ("turn", Fault(as_stored), True),
    ("shape", Fault(without_size), True),
    ("middle", Fault(by_beginning), True),
    ("sampled", Fault(by_samples), True),
    ("pixel", Fault(by_blocks), True),
    ("last byte", Fault(without_last_byte), False),
    ("order", Fault(by_bytes, sorted_images=True), False),
    ("limits", Fault(by_bytes, ignored=("mm_processor_kwargs",)), True),
    ("region", Fault(by_bytes, whole=True), True),
    ("page", Fault(by_bytes, whole=True), True),
    ("tenant", Fault(by_bytes, ignored=("cache_salt",)), True),
    ("adjacent", Fault(by_bytes, adjacent=True), True),
    ("short", Fault(by_crc), True),
    ("short", Fault(by_short_hash), False),
    ("tool", Fault(by_bytes, tools=True), True),
    ("aborted", Fault(by_bytes, leaks=True), True),
    ("frames", Fault(by_bytes, first_frame=True), True),
    ("query", Fault(by_bytes, by_url="without query"), True),
    ("url", Fault(by_bytes, by_url="always"), False),
    ("changed", Fault(by_bytes, by_url="guessed"), False),
    ("uuid", Fault(by_bytes, by_uuid="always"), False),
    ("uuid", Fault(by_bytes, by_uuid="alone", ignored=("cache_salt",)), True),
    ("behind", Fault(by_bytes, long_text=500), False),
    ("tiles", Fault(by_first_tiles), True),
    ("video", Fault(by_bytes, any_kind=True), True),
    ("restart", Fault(by_bytes, counted=True), True),
    ("many", Fault(few_bits(4)), True),
    ("many", Fault(by_bytes, slots=8), False),
    ("many", Fault(by_bytes, shared=True), False),
]
"""(case that finds the error, error, False for a slow test). Slow cases find their errors in the
same way as others.
"""
CLEAN = {"plain": "shape", "order": "sampled", "many": "order", "adjacent": "plain"}
"""For each case, another case that finds no error in the same server. The default is "order"."""


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(case, fault, id=case, marks=() if often else pytest.mark.slow)
        for case, fault, often in PLANTED
    ],
)
def test_a_planted_fault_is_found_by_its_case_alone(
    server: Server, case: str, fault: Fault
) -> None:
    with faulty(server.url, fault) as url:
        restart = f"{sys.executable} -c 'import httpx; httpx.post(\"{url}{RESTART}\")'"
        proof = try_on(url, case, CLEAN.get(case, "order"), images=12, restart=restart)
        assert proof.mixed_up == [case]


def test_answers_that_are_another_images_are_found_without_reading_them(server: Server) -> None:
    with faulty(server.url, Fault(without_palette)) as url:
        proof = try_on(url, "palette", "plain", cold=server.url)
    assert proof.unlike_cold == proof.mixed_up == ["palette"]
    about_other, about_own = proof.cold["palette"].requests
    assert about_other["messages"] != about_own["messages"]
    assert proof.cold["plain"].own > 0 == proof.cold["plain"].others


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with random weights."""
    folder, logs = tmp_path_factory.mktemp("random"), tmp_path_factory.mktemp("unread")
    with serving(make_checkpoint(folder, "qwen3_vl"), logs) as found:
        yield found


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("palette", Fault(without_palette)),
        ("order", Fault(by_bytes, sorted_images=True)),
        ("short", Fault(by_crc)),
        ("adjacent", Fault(by_bytes, adjacent=True)),
    ],
)
def test_a_model_with_random_weights_shows_whose_image_an_answer_is_about(
    unread: Server, case: str, fault: Fault
) -> None:
    with faulty(unread.url, fault) as url:
        proof = try_on(url, case, "plain", cold=unread.url)
    assert proof.unlike_cold == [case]
    assert proof.findings["plain"].verdict == "not judged" and proof.cold["plain"].own > 0


def test_a_distance_ends_with_the_first_token_that_differs() -> None:
    def answer(*tokens: tuple[str, float, str, float]) -> JudgedAnswer:
        scores = tuple(((a, x), (a, x), (b, y)) for a, x, b, y in tokens)
        return JudgedAnswer("", None, None, scores)

    one = answer(("The", -0.1, "It", -2.0), ("7", -0.5, "1", -1.0), ("7", -0.1, "x", -9.0))
    other = answer(("The", -0.1, "It", -2.5), ("1", -0.5, "7", -1.5), ("9", -5.0, "x", -0.1))
    assert distance(one, other) == 1.0
    assert distance(one, one) == 0


def test_each_case_has_a_fault_that_it_finds() -> None:
    assert {case for case, _, _ in PLANTED} | {"adapter"} == {case.name for case in CASES}


def test_a_command_that_does_not_restart_the_server_is_refused(server: Server) -> None:
    with pytest.raises(ProveError, match="exits with status 3: no such unit"):
        try_on(server.url, "restart", restart="echo no such unit >&2; exit 3")


def test_a_server_that_does_not_show_a_tools_images_is_not_judged(server: Server) -> None:
    with faulty(server.url, Fault(by_bytes, blind_tools=True)) as url:
        found = try_on(url, "tool").findings["tool"]
    assert found.verdict == "not judged" and "no prompt tokens" in found.why


@pytest.mark.slow
def test_nothing_is_found_in_a_cache_that_heeds_everything(server: Server) -> None:
    with faulty(server.url, Fault(by_bytes)) as url:
        assert not try_on(url, images=4).mixed_up


@pytest.mark.parametrize(
    "case",
    ["tenant", *(pytest.param(c, marks=pytest.mark.slow) for c in ("plain", "pixel", "video"))],
)
def test_a_prompts_head_that_is_cached_is_no_mistake(server: Server, case: str) -> None:
    head = f"You look at {case} pictures. " + "Read each number that you see. " * 5
    with faulty(server.url, Fault(by_bytes), head) as url:
        assert not try_on(url, case).mixed_up


@pytest.mark.slow
def test_a_name_of_16_bits_is_found(server: Server) -> None:
    with faulty(server.url, Fault(few_bits(16))) as url:
        assert try_on(url, "many", images=600).mixed_up == ["many"]


def test_an_answer_of_another_model_is_found(adapted: Server) -> None:
    assert try_on(adapted.url, "adapter").findings["adapter"].verdict == "kept apart"
    with faulty(adapted.url, Fault(by_bytes)) as url:
        assert not try_on(url, "adapter", "plain").mixed_up
    with faulty(adapted.url, Fault(by_bytes, ignored=("model",))) as url:
        assert try_on(url, "adapter", "plain").mixed_up == ["adapter"]


def test_twins_differ_where_they_should_and_nowhere_else() -> None:
    one, other = pictures.numbers(SEED, 2)
    first, second = pictures.sampled(one, other)
    assert by_samples(first.encoded) == by_samples(second.encoded)
    assert first.encoded[:: pictures.STRIDE] == second.encoded[:: pictures.STRIDE]
    first, second = pictures.palettes(one, other)
    assert _data(first.encoded) == _data(second.encoded)
    first, second = pictures.middles(one, other)
    ends = slice(None, pictures.SHARED_BYTES), slice(-pictures.SHARED_BYTES, None)
    assert all(first.encoded[end] == second.encoded[end] for end in ends)
    for key, hashed in pictures.SHORT_KEYS.items():
        first, second = pictures.colliding(key, one, other)
        assert hashed(first.encoded) == hashed(second.encoded) and first.encoded != second.encoded
    first, second = pictures.turns(one)
    assert sum(a != b for a, b in zip(first.encoded, second.encoded, strict=True)) == 1
    first, second = pictures.last_byte(one)
    assert first.encoded[:-1] == second.encoded[:-1] and first.encoded != second.encoded
    first, second = pictures.one_pixel(one)
    assert (pixels_of(first.encoded) != pixels_of(second.encoded)).any(-1).sum() == 1
    first, second = pictures.shapes(one)
    assert pixels_of(first.encoded).tobytes() == pixels_of(second.encoded).tobytes()


def _data(encoded: bytes) -> bytes:
    """Return the compressed pixels of a PNG."""
    at, found = 8, b""
    while at < len(encoded):
        length = int.from_bytes(encoded[at : at + 4], "big")
        if encoded[at + 4 : at + 8] == b"IDAT":
            found += encoded[at + 8 : at + 8 + length]
        at += length + 12
    return found


def test_no_number_is_another_with_one_digit_read_wrongly() -> None:
    found = pictures.numbers(SEED, 500)
    pairs = ((one, other) for one in found for other in found if one < other)
    assert all(sum(a != b for a, b in zip(*pair, strict=True)) > 1 for pair in pairs)


def test_the_folder_is_a_package_that_imports_nothing_else_of_saccade(tmp_path: Path) -> None:
    """As which its pyproject.toml packages it."""
    folder = Path(pictures.__file__).parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    (name,) = project["tool"]["setuptools"]["packages"]
    shutil.copytree(folder, tmp_path / name.replace(".", "/"))
    code = f"import sys, {name}.__main__; print(*(n for n in sys.modules if n[:7] == 'saccade'))"
    command = [sys.executable, "-S", "-P", "-c", code]
    packages = Path(httpx.__file__).parents[1]  # without -S, .pth files would add the clone
    path = f"{tmp_path}:{packages}"
    imported = subprocess.check_output(command, env={"PYTHONPATH": path}, text=True).split()
    assert name in imported
    assert all(each == "saccade_bench" or each.startswith(name) for each in imported)


def test_an_unknown_case_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ProveError, match=", ".join(case.name for case in CASES)):
        try_on("http://127.0.0.1:1", "twins")
