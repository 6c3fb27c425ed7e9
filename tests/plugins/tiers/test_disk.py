from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from saccade.core.config import DISK_BLOCK, embedding_file_bytes
from saccade.core.errors import ConfigError
from saccade.core.plan import Happened
from saccade.core.types import ImageKey
from saccade.plugins.tiers import items as on_disk
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.disk import Folder
from saccade.plugins.tiers.host import UNBUFFERED
from saccade.plugins.tiers.items import Embeddings
from saccade.plugins.tiers.options import TierOptions
from saccade.plugins.tiers.rare_warnings import SECONDS, RareWarnings

A, B, C = (ImageKey(bytes([n] * 32), bytes(16), "salt" * (n % 2)) for n in range(3))
WIDTH = 8
LOST: tuple[tuple[tuple[ImageKey, Happened]], ...] = (
    ((A, "damaged"),),
    ((A, "missing"),),
    ((A, "not read"),),
)


def open_tier(
    folder: Path, fingerprint: bytes = b"model", dtype: torch.dtype = torch.bfloat16
) -> Background[ImageKey]:
    return Background(Folder(folder, Embeddings(fingerprint, WIDTH, dtype), UNBUFFERED, 0))


def path_of(tier: Background[ImageKey], key: ImageKey) -> Path:
    assert isinstance(tier.store, Folder)
    return tier.store.path(key)


def rows(key: ImageKey, num_tokens: int = 5) -> torch.Tensor:
    return torch.randn(
        num_tokens, WIDTH, generator=torch.Generator().manual_seed(key.digest[0])
    ).to(torch.bfloat16)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Background[ImageKey]]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three embeddings that an earlier run has left, in order of age."""
    tier = open_tier(tmp_path)
    for key in (A, B, C):
        tier.write(key, rows(key))
    tier.close()
    files = [path_of(tier, key) for key in (A, B, C)]
    for age, file in enumerate(files):
        os.utime(file, (age, age))
    return files


@pytest.mark.parametrize("num_tokens", [1, 5, 256, 257, 2000])
@pytest.mark.parametrize("salt", ["", "f" * 32])
def test_a_file_takes_what_is_counted_for_it(tmp_path: Path, num_tokens: int, salt: str) -> None:
    key = ImageKey(bytes([255] * 32), bytes([255] * 16), salt)
    tier = open_tier(tmp_path)
    tier.write(key, rows(key, num_tokens))
    tier.close()
    size = path_of(tier, key).stat().st_size
    taken = -(-size // DISK_BLOCK) * DISK_BLOCK
    assert taken == embedding_file_bytes(rows(key, num_tokens).nbytes)


def test_it_survives_a_restart_the_oldest_first(tmp_path: Path, files: list[Path]) -> None:
    tier = open_tier(tmp_path)
    assert tier.store.found == ((A, 5), (B, 5), (C, 5))
    tier.begin_read(B, 5)
    assert tier.collect(wait=True) == ((B, "read"),)
    assert torch.equal(tier.take_rows(B), rows(B))
    tier.close()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_file_with_values_that_are_no_numbers_is_removed_when_it_is_read(
    tmp_path: Path, files: list[Path], value: float
) -> None:
    """Its own checksum is right: whoever made it had them already."""
    data = files[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    dtype = header[on_disk.TENSOR]["dtype"]
    size = 4 if dtype == "F32" else 2
    bad = torch.tensor([value], dtype={"F32": torch.float32, "BF16": torch.bfloat16}[dtype])
    values[-size:] = bad.view(torch.uint8).numpy().tobytes()
    before = header["__metadata__"]["blake3"].encode()
    files[0].write_bytes(
        data[: 8 + length].replace(before, blake3(values).hexdigest().encode()) + values
    )
    tier = open_tier(tmp_path)
    tier.begin_read(A, 5)
    assert tier.collect(wait=True) in LOST
    assert not files[0].exists()
    tier.begin_read(B, 5)
    assert tier.collect(wait=True) == ((B, "read"),)
    tier.close()


def put_foreign(file: Path, what: str, other: Path) -> None:
    """In place of an embedding, `what` nobody of ours has written."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    match what:
        case "a salt that is no text":
            header["__metadata__"]["salt"] = 5
        case "a salt that cannot be encoded":
            header["__metadata__"]["salt"] = "\ud800"
        case "no checksum":
            del header["__metadata__"]["blake3"]
        case "no tokens":
            header[on_disk.TENSOR]["shape"][0], values = 0, b""
        case "another shape":
            header[on_disk.TENSOR]["shape"] = "AB"
    text = b"[" * 60_000 if what == "a deep header" else json.dumps(header).encode()
    file.unlink()
    match what:
        case "a link to nowhere":
            file.symlink_to("nowhere")
        case "a link to a good file":
            other.rename(file.parent.parent / "elsewhere")
            file.symlink_to(file.parent.parent / "elsewhere")
        case "a pipe":
            os.mkfifo(file)
        case _:
            file.write_bytes(len(text).to_bytes(8, "little") + text + values)


FOREIGN = (
    *("a link to nowhere", "a link to a good file", "a pipe", "a deep header"),
    *(
        "a salt that is no text",
        "a salt that cannot be encoded",
        "no checksum",
        "no tokens",
        "another shape",
    ),
)


@pytest.mark.parametrize("what", FOREIGN)
def test_what_others_put_there_is_removed_unopened_or_unread(
    tmp_path: Path, files: list[Path], what: str
) -> None:
    good = files[0].read_bytes()
    put_foreign(files[0], what, files[2])
    tier = open_tier(tmp_path)
    assert (B, 5) in tier.store.found and A not in dict(tier.store.found)
    assert not os.path.lexists(files[0])
    files[0].write_bytes(good)
    files[2].write_bytes(good)
    put_foreign(files[0], what, files[2])
    tier.begin_read(A, 5)
    assert tier.collect(wait=True) in LOST
    assert not os.path.lexists(files[0])
    tier.close()


def test_a_folder_in_the_place_of_a_file_is_said_to_stay(
    tmp_path: Path, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    files[0].unlink()
    files[0].mkdir()
    tier = open_tier(tmp_path)
    assert tier.store.found == ((B, 5), (C, 5)) and files[0].is_dir()
    assert "is not used (it is not a regular file), and cannot be removed" in caplog.text
    tier.close()


def test_what_can_be_neither_read_nor_removed_nor_written_is_said_and_the_work_goes_on(
    tmp_path: Path, files: list[Path]
) -> None:
    tier = open_tier(tmp_path)
    files[0].unlink()
    files[0].mkdir()
    tier.begin_read(A, 5)
    assert tier.collect(wait=True) in LOST
    tier.remove(A)
    tier.write(A, rows(A))
    assert tier.collect(wait=True) == ((A, "not saved"),)
    tier.begin_read(B, 5)
    assert tier.collect(wait=True) == ((B, "read"),)
    tier.close()
    assert sorted(files[0].parent.iterdir()) == sorted(files), "no draft is left"


@contextmanager
def no_more_files() -> Iterator[None]:
    """The process may open no file."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_cannot_be_read_for_now_stays(
    tier: Background[ImageKey], tmp_path: Path
) -> None:
    tier.write(A, rows(A))
    tier.begin_read(A, 5)
    assert tier.collect(wait=True) == ((A, "read"),)
    with no_more_files():
        tier.begin_read(A, 5)
        assert tier.collect(wait=True) in LOST
    tier.begin_read(A, 5)
    assert tier.collect(wait=True) == ((A, "read"),)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_at_the_start_stays(tmp_path: Path, files: list[Path]) -> None:
    files[0].chmod(0)
    tier = open_tier(tmp_path)
    assert tier.store.found == ((B, 5), (C, 5)) and files[0].exists()
    tier.close()


def test_what_a_crash_left_behind_is_removed(tmp_path: Path, files: list[Path]) -> None:
    draft = files[0].with_suffix(".1234.tmp")
    draft.write_bytes(files[0].read_bytes()[:50])
    stray = files[0].parent / "notes.txt"
    stray.write_text("hello")
    tier = open_tier(tmp_path)
    assert len(tier.store.found) == 3 and not draft.exists()
    assert stray.exists(), "nobody of ours has written it"
    tier.close()


@pytest.mark.more
def test_a_crash_at_any_moment_of_writing_leaves_only_whole_files(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from tests.plugins.tiers.test_disk import "
        "open_tier; from saccade.core.types import ImageKey\n"
        "tier = open_tier(Path(sys.argv[1]))\n"
        "for n in range(200):\n"
        "    tier.write(ImageKey(bytes([n] * 32), bytes(16)), torch.ones(20000, 8, "
        "dtype=torch.bfloat16))\n"
        "print('writing', flush=True); tier.close()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    tier = open_tier(tmp_path)
    assert len(tier.store.found) < 200
    for key, num_tokens in tier.store.found:
        tier.begin_read(key, num_tokens)
        assert tier.collect(wait=True) == ((key, "read"),)
        assert num_tokens == 20000 and bool((tier.take_rows(key) == 1).all())
    assert len(list((tmp_path / b"model".hex()).iterdir())) == len(tier.store.found)
    tier.close()


def test_what_cannot_be_written_is_said_and_leaves_nothing(
    tmp_path: Path, tier: Background[ImageKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    tier.write(A, rows(A))
    assert tier.collect(wait=True) == ((A, "not saved"),)
    assert not list((tmp_path / b"model".hex()).iterdir())


def test_only_the_owner_may_read_the_files(files: list[Path]) -> None:
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert files[0].parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_one_line_with_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many items it does not take; another fault has a line of its own."""
    tier = open_tier(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for number in range(50):
            tier.write(ImageKey(bytes([number] * 32), bytes(16), ""), rows(A))
            assert tier.collect(wait=True)[0][1] == "not saved"
    tier.begin_read(C, 5)
    assert tier.collect(wait=True) == ((C, "missing"),)
    tier.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "No space left on device" in said[0] and "was removed" in said[1]
    assert "No space left on device: 49 similar warnings suppressed" in said[2]


def test_a_warning_comes_again_after_its_interval_with_what_was_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    warnings = RareWarnings(lambda: now[0])
    for seconds in (0.0, 1.0, 2.0, SECONDS, SECONDS + 1):
        now[0] = seconds
        warnings.warn("kind", f"at {seconds:g}")
    warnings.warn("other", "at once")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["at 0", f"at {SECONDS:g} (2 similar warnings suppressed)", "at once"]


def test_somebody_elses_folder_is_refused_by_name(tmp_path: Path) -> None:
    """One of an earlier version, which had no marker, is taken over."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "letter.txt").write_text("dear")
    with pytest.raises(OSError, match=r"it contains 'letter\.txt' but no \.saccade-embeddings"):
        open_tier(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"--embedding-cache-dir .*letter\.txt"):
        TierOptions(embedding_cache_dir=str(tmp_path / "theirs"))
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["letter.txt"]
    old = tmp_path / "old"
    (old / ("0" * 32)).mkdir(parents=True)
    (old / "cards").mkdir()
    TierOptions(embedding_cache_dir=str(old))
    open_tier(old).close()
    assert (old / ".saccade-embeddings").is_file()
    open_tier(old).close()
