"""What a start finds out is found out once for the same machine, versions, files and shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from saccade.core.config import ParallelConfig
from saccade.ipc.messages import Load
from saccade.plugins.cpu import disk_cache, startup_info
from saccade.plugins.cpu.disk_cache import UsedFiles, file_name, store
from saccade.plugins.cpu.startup_info import describe_network, load_or_measure
from saccade.runtime.start import Origin

ALONE = ParallelConfig(1, "weights", "shm", 60.0)
LOAD = Load("folder", "cpu", "bfloat16", "auto", 1, ALONE)


class Starts:
    """Starts of one network, each a process of its own, and how often they measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = 0
        self._monkeypatch = monkeypatch

    def begin(self, words: str) -> tuple[bool, str]:
        tally = UsedFiles()
        self._monkeypatch.setattr(startup_info, "USED_FILES", tally)
        self._monkeypatch.setattr(disk_cache, "USED_FILES", tally)
        return load_or_measure(words, self._measure)

    def _measure(self) -> bool:
        self.measured += 1
        store("a kernel", b"code")
        return True


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade" / "code"


@pytest.fixture
def starts(code: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


def test_the_second_start_measures_and_compiles_nothing(starts: Starts) -> None:
    assert starts.begin("a") == (True, "1 kernel compiled, exact rows measured")
    assert starts.begin("a") == (True, "1 kernel and exact rows kept from last start")
    assert starts.measured == 1
    starts.begin("b")
    assert starts.measured == 2, "other words are another network"


@pytest.mark.parametrize("harm", ["facts torn", "facts strange", "kernel torn", "kernel gone"])
def test_what_cannot_be_trusted_is_measured_again(starts: Starts, code: Path, harm: str) -> None:
    starts.begin("a")
    facts, kernel = code / file_name("a"), code / file_name("a kernel")
    match harm:
        case "facts torn":
            facts.write_bytes(facts.read_bytes()[:-1])
        case "facts strange":
            store("a", b'{"exact": 7}')
        case "kernel torn":
            kernel.write_bytes(kernel.read_bytes() + b"!")
        case _:
            kernel.unlink()
    starts.begin("a")
    assert starts.measured == 2
    starts.begin("a")
    assert starts.measured == 2


def test_without_words_or_a_folder_every_start_measures(starts: Starts, code: Path) -> None:
    for _ in range(2):
        starts.begin("")
    assert starts.measured == 2
    code.chmod(0o777)
    for _ in range(2):
        starts.begin("a")
    assert starts.measured == 4, "others could write there"


def test_words_differ_with_whatever_numbers_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(8))
    seen = [describe_network(Origin(LOAD, tmp_path))]
    assert describe_network(Origin(LOAD, tmp_path)) == seen[0]
    for other in (
        replace(LOAD, dtype="float32"),
        replace(LOAD, threads=2),
        replace(LOAD, quantization="int8"),
    ):
        seen.append(describe_network(Origin(other, tmp_path)))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    seen.append(describe_network(Origin(LOAD, tmp_path)))
    monkeypatch.setattr(startup_info, "source_digest", lambda: "another version")
    seen.append(describe_network(Origin(LOAD, tmp_path)))
    weights.write_bytes(bytes(9))
    seen.append(describe_network(Origin(LOAD, tmp_path)))
    assert len({*seen}) == len(seen)
    assert describe_network(Origin(replace(LOAD, parallel=replace(ALONE, size=2)), tmp_path)) == ""
