"""A folder that several servers write: one budget, whole files, nothing left of who dies."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from saccade.core.claims import warn_of_others
from saccade.core.config import DISK_BLOCK, embedding_file_bytes
from saccade.core.errors import ConfigError
from saccade.core.store import DRAFT, EMBEDDING_FILES, SUFFIX, file_name
from saccade.core.types import ImageKey
from saccade.plugins.files.options import FileOptions
from saccade.plugins.tiers import shared
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.host import UNBUFFERED
from saccade.plugins.tiers.items import Embeddings
from saccade.plugins.tiers.options import TierOptions
from saccade.plugins.tiers.shared import SharedBudget, SharedFolder
from tests.plugins.tiers.test_disk import path_of

WIDTH, TOKENS = 64, 40
ONE = embedding_file_bytes(WIDTH * TOKENS * 2)
BUDGET = 20 * ONE
MODEL = b"model".ljust(16)


def key(number: int) -> ImageKey:
    return ImageKey(number.to_bytes(32, "little"), bytes(16), "")


def rows(number: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(number)
    return torch.randn(TOKENS, WIDTH, generator=chance).to(torch.bfloat16)


def open_tier(root: Path, budget: int = BUDGET, model: bytes = MODEL) -> Background[ImageKey]:
    items = Embeddings(model, WIDTH, torch.bfloat16)
    return Background(SharedFolder(root, items, UNBUFFERED, budget))


def read(tier: Background[ImageKey], number: int, tokens: int = TOKENS) -> torch.Tensor | None:
    """None: it is not there."""
    tier.begin_read(key(number), tokens)
    events = tier.collect(wait=True)
    while not any(name == key(number) and told != "not saved" for name, told in events):
        events += tier.collect(wait=True)
    return tier.take_rows(key(number)) if (key(number), "read") in events else None


def used(root: Path) -> int:
    """Bytes of the files below `root`, at one moment: nobody makes room meanwhile, and a file that
    is given its name is counted once.
    """
    sizes: dict[int, int] = {}
    with (root / "lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in root.glob("*/*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            sizes[found.st_ino] = -(-found.st_size // DISK_BLOCK) * DISK_BLOCK
    return sum(sizes.values())


def test_what_one_server_has_written_another_reads(tmp_path: Path) -> None:
    one, other = open_tier(tmp_path), open_tier(tmp_path)
    assert one.store.found == other.store.found == ()
    assert read(other, 1) is None
    one.write(key(1), rows(1))
    one.close()
    found = read(other, 1)
    assert found is not None and torch.equal(found, rows(1))
    assert (Path(other.store.shared) / file_name(key(1))).is_file()
    assert read(other, 1, TOKENS + 1) is None, "another number of tokens is another image's"
    other.close()


def test_a_file_is_written_once(tmp_path: Path) -> None:
    one, other = open_tier(tmp_path), open_tier(tmp_path)
    one.write(key(1), rows(1))
    one.close()
    inode = path_of(one, key(1)).stat().st_ino
    other.write(key(1), rows(1))
    other.close()
    assert path_of(one, key(1)).stat().st_ino == inode


def test_what_was_used_least_lately_goes_whoever_wrote_it_and_of_whatever_model(
    tmp_path: Path,
) -> None:
    one, other = open_tier(tmp_path), open_tier(tmp_path, model=b"other".ljust(16))
    for number in range(20):
        tier = (one, other)[number % 2]
        tier.write(key(number), rows(number))
        while not (path := path_of(tier, key(number))).exists():
            time.sleep(0.002)
        os.utime(path, (number, number))
    assert used(tmp_path) == BUDGET
    assert read(one, 0) is not None
    one.write(key(20), rows(20))
    one.close()
    other.close()
    assert used(tmp_path) <= BUDGET
    assert path_of(one, key(0)).exists() and path_of(one, key(20)).exists()
    assert not path_of(other, key(1)).exists()


def test_what_a_dead_writer_has_left_is_removed_and_what_a_live_one_writes_is_counted(
    tmp_path: Path,
) -> None:
    room = SharedBudget(tmp_path, 4 * ONE)
    folder = tmp_path / MODEL.hex()
    folder.mkdir()
    left = folder / f".{'0' * 16}{DRAFT}"
    left.write_bytes(b"x" * ONE)
    whole = folder / ("a" * 40 + SUFFIX)
    with room.draft(whole, 3 * ONE) as file:
        file.write(bytes(3 * ONE))
        SharedBudget(tmp_path, 4 * ONE)  # as a server that starts does
        assert len([*folder.iterdir()]) == 1 and not left.exists()
        with pytest.raises(OSError, match="the directory is full"), room.draft(left, 2 * ONE):
            raise AssertionError("there is no room beside what is being written")
    assert list(folder.iterdir()) == [whole]
    with pytest.raises(ZeroDivisionError), room.draft(left, 4 * ONE):
        raise ZeroDivisionError
    assert list(folder.iterdir()) == [], "room was made, and what failed is not there"


def test_a_lock_that_is_held_costs_a_save_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_SECONDS", 0.02)
    tier = open_tier(tmp_path)
    with SharedBudget(tmp_path, BUDGET)._locked():
        tier.write(key(1), rows(1))
        assert tier.collect(wait=True) == ((key(1), "not saved"),)
    tier.write(key(1), rows(1))
    assert read(tier, 1) is not None
    tier.close()


def test_a_count_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(20):
        tier.write(key(number), rows(number))
    tier.close()
    (tmp_path / "lock").write_bytes(b"nonsense")
    again = open_tier(tmp_path)
    again.write(key(99), rows(99))
    again.close()
    assert used(tmp_path) <= BUDGET and path_of(again, key(99)).exists()


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_folder_that_somebody_else_uses_is_refused_and_nothing_in_it_is_touched(
    tmp_path: Path,
) -> None:
    for number in range(3):
        weights = tmp_path / "big" / f"model-{number}.safetensors"
        weights.parent.mkdir(exist_ok=True)
        weights.write_bytes(bytes(8 * ONE))
    before = tree(tmp_path)
    told = "contains 'big' but no .saccade-embeddings.* choose an empty"
    with pytest.raises(OSError, match=told):
        open_tier(tmp_path, ONE)
    with pytest.raises(ConfigError, match=f"--embedding-cache-dir .*{told}"):
        TierOptions(embedding_cache_dir=str(tmp_path), embedding_cache_shared=True)
    with pytest.raises(ConfigError, match=r"--files-dir .* no .saccade-files"):
        FileOptions(files_dir=str(tmp_path))
    assert tree(tmp_path) == before


def test_what_is_put_beside_ours_later_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    """Each has something of our names: the folder's, the file's, the ending."""
    open_tier(tmp_path, 4 * ONE).close()
    strangers = [
        tmp_path / "big" / "model.safetensors",
        tmp_path / "big" / ("a" * 40 + SUFFIX),
        tmp_path / "big" / f".{'0' * 16}{DRAFT}",
        tmp_path / MODEL.hex() / "model.safetensors",
        tmp_path / MODEL.hex() / f".x{DRAFT}",
        tmp_path / ("A" * 32) / ("a" * 40 + SUFFIX),
    ]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_bytes(bytes(8 * ONE))
    tier = open_tier(tmp_path, 4 * ONE)
    for number in range(8):
        tier.write(key(number), rows(number))
    tier.close()
    assert all(stranger.stat().st_size == 8 * ONE for stranger in strangers)
    assert path_of(tier, key(7)).exists(), "and there was room for ours"


def test_a_folder_of_an_earlier_version_is_taken(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(key(1), rows(1))
    tier.close()
    (tmp_path / ".saccade-embeddings").unlink()
    TierOptions(embedding_cache_dir=str(tmp_path), embedding_cache_shared=True)
    again = open_tier(tmp_path)
    assert read(again, 1) is not None and (tmp_path / ".saccade-embeddings").is_file()
    again.close()


def test_a_pipe_a_link_and_a_hole_among_the_drafts_hold_up_nobody(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(key(1), rows(1))
    tier.close()
    folder, victim = Path(tier.store.shared), tmp_path.parent / f"{tmp_path.name}-victim"
    victim.write_bytes(b"of somebody else")
    os.mkfifo(folder / f".{'0' * 16}{DRAFT}")
    os.mkfifo(folder / ("0" * 40 + SUFFIX))
    (folder / f".{'1' * 16}{DRAFT}").symlink_to(victim)
    (folder / ("1" * 40 + SUFFIX)).symlink_to(victim)
    with (folder / ("2" * 40 + SUFFIX)).open("wb") as hole:
        hole.truncate(1 << 40)
    assert EMBEDDING_FILES.nbytes(tmp_path) < BUDGET
    again = open_tier(tmp_path)
    assert read(again, 1) is not None, "a file of holes takes nobody's room"
    again.close()
    assert victim.read_bytes() == b"of somebody else"


@pytest.mark.parametrize("what", ["link", "pipe", "another name of a file"])
@pytest.mark.parametrize("name", ["lock", ".saccade-embeddings"])
def test_what_stands_in_the_place_of_our_own_files_is_not_written_to(
    tmp_path: Path, name: str, what: str
) -> None:
    open_tier(tmp_path).close()
    victim = tmp_path.parent / f"{tmp_path.name}-victim"
    victim.write_bytes(b"")
    (tmp_path / name).unlink()
    match what:
        case "link":
            (tmp_path / name).symlink_to(victim)
        case "pipe":
            os.mkfifo(tmp_path / name)
        case _:
            (tmp_path / name).hardlink_to(victim)
    with pytest.raises(OSError, match=f"{name} is not a regular file owned by this user"):
        open_tier(tmp_path)
    assert victim.read_bytes() == b""


def test_a_link_in_the_place_of_a_models_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    theirs = outside / ("a" * 40 + SUFFIX)
    theirs.write_bytes(bytes(8 * ONE))
    root = tmp_path / "shared"
    open_tier(root, 4 * ONE, model=b"other".ljust(16)).close()
    (root / MODEL.hex()).symlink_to(outside)
    room = SharedBudget(root, 4 * ONE)
    with room.draft(root / b"other".ljust(16).hex() / ("b" * 40 + SUFFIX), 4 * ONE):
        assert theirs.exists()
    with pytest.raises(OSError, match="is not a directory"):
        open_tier(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_files_are_not_believed_counted_or_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4 * ONE)
    for number in (1, 2):
        tier.write(key(number), rows(number))
    tier.close()
    theirs = path_of(tier, key(1))
    os.chown(theirs, 12345, 12345)
    again = open_tier(tmp_path, 2 * ONE)
    assert read(again, 1) is None and read(again, 2) is not None
    again.write(key(3), rows(3))
    again.write(key(4), rows(4))
    again.close()
    assert theirs.exists() and path_of(again, key(4)).exists()
    os.chown(Path(tier.store.shared), 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user"):
        open_tier(tmp_path)


def test_a_folder_that_others_may_write_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_others("--embedding-cache-dir", tmp_path)
    assert not caplog.text
    tmp_path.chmod(0o777)
    warn_of_others("--embedding-cache-dir", tmp_path)
    assert f"--embedding-cache-dir {tmp_path} has mode 777" in caplog.text


def churn(root: Path, seed: int, count: int) -> None:
    """Write and read random embeddings; exits with 1 where one is wrong."""
    chance, tier = random.Random(seed), open_tier(root)
    for _ in range(count):
        number = chance.randrange(60)
        found = read(tier, number)
        if found is None:
            tier.write(key(number), rows(number))
        elif not torch.equal(found, rows(number)):
            os._exit(1)
    tier.close()
    os._exit(0)


@pytest.mark.more
@pytest.mark.parametrize(
    ("rounds", "count"), [(3, 60), pytest.param(40, 400, marks=pytest.mark.slow)]
)
def test_writers_that_are_killed_leave_whole_files_within_the_budget(
    tmp_path: Path, rounds: int, count: int
) -> None:
    """Three at a time, one of which is killed; the budget is looked at all the while."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(0)
    for number in range(rounds):
        seeds = (number * 3 + i for i in range(3))
        rank_group = [context.Process(target=churn, args=(tmp_path, seed, count)) for seed in seeds]
        for process in rank_group:
            process.start()
        doomed = time.monotonic() + chance.uniform(0.02, 0.3)
        while any(process.is_alive() for process in rank_group):
            if time.monotonic() > doomed and rank_group[0].is_alive():
                os.kill(rank_group[0].pid or 0, signal.SIGKILL)
            assert used(tmp_path) <= BUDGET
            time.sleep(0.001)
        assert [process.exitcode for process in rank_group[1:]] == [0, 0]
        assert rank_group[0].exitcode in (0, -signal.SIGKILL)
    SharedBudget(tmp_path, BUDGET)
    assert not [*tmp_path.glob(f"*/*{DRAFT}")]
    tier = open_tier(tmp_path)
    files = [*tmp_path.glob("*/*" + SUFFIX)]
    assert files
    whole = [number for number in range(60) if read(tier, number) is not None]
    assert len(whole) == len(files), "every file is whole, and what its name says"
    tier.close()
