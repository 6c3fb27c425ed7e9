"""What every tier answers: each file of `plugins/tiers/` with a `STORE`, for each kind of item, and
host memory. A dummy beside them shows that a new tier is one file.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch

from saccade.core.config import EmbeddingBudgets, KVConfig, PageTierConfig
from saccade.core.types import ImageKey
from saccade.plugins import tiers
from saccade.plugins.tiers import background
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.host import UNBUFFERED
from saccade.plugins.tiers.items import Damaged, Embeddings, Items, Memory, Pages
from saccade.plugins.tiers.store import Store, open_store
from saccade.runtime.tiers import SameMemory, values_of
from tests.families.answers import CASES, Model, check
from tests.fixtures.harness import Harness
from tests.helpers.page_tiers import kept_of

DUMMY = str(Path(__file__).parent / "dummy_tier")
WIDTH = 8


@dataclass(frozen=True)
class Kind:
    """Items as tiers keep them."""

    name: str
    items: Callable[[bytes], Items[Any]]
    key: Callable[[int], Any]
    rows: Callable[[int], torch.Tensor]
    size: int


def embedding(number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randn(5, WIDTH, generator=made).to(torch.bfloat16)


def page(number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (1, 300), dtype=torch.uint8, generator=made)


EMBEDDINGS = Kind(
    "embeddings",
    lambda model: Embeddings(model, WIDTH, torch.bfloat16),
    lambda number: ImageKey(bytes([number] * 32), bytes(16), "salt" * (number % 2)),
    embedding,
    5,
)
PAGES = Kind("pages", Pages, lambda number: bytes([number] * 32), page, 300)
ALONE = {("shared", "pages")}
"""What no option asks for: pages are one server's."""


def stores() -> Iterator[str]:
    for found in iter_modules([*tiers.__path__, DUMMY]):
        folder = Path(found.module_finder.path)  # type: ignore[union-attr]
        if "\nSTORE = " in (folder / f"{found.name}.py").read_text():
            yield found.name


CASES_OF_STORES = [
    pytest.param(name, kind, id=f"{kind.name} {name}")
    for name in stores()
    for kind in (EMBEDDINGS, PAGES)
    if (name, kind.name) not in ALONE
]
every = pytest.mark.parametrize(("name", "kind"), CASES_OF_STORES)


@pytest.fixture(autouse=True)
def dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "__path__", [*tiers.__path__, DUMMY])


def opened(
    name: str, kind: Kind, root: Path, memory: Memory = UNBUFFERED, model: bytes = b"m" * 16
) -> Store[Any]:
    return open_store(name, root, kind.items(model), memory, 1 << 24)


def file_of(rows: torch.Tensor, root: Path) -> Path:
    values = bytes(values_of(rows))
    (found,) = [each for each in root.rglob("*") if each.is_file() and values in each.read_bytes()]
    return found


def test_there_are_tiers_to_look_at() -> None:
    assert {"disk", "shared", "shelf"} <= {*stores()}


@every
def test_what_is_put_is_there_until_it_is_dropped(name: str, kind: Kind, tmp_path: Path) -> None:
    store, (one, other) = opened(name, kind, tmp_path), map(kind.key, (1, 2))
    assert store.found == () and not store.has(one)
    with pytest.raises(FileNotFoundError):
        store.get(one, kind.size)
    for number in (1, 2):
        store.put(kind.key(number), kind.rows(number), None)
    assert store.has(one) and store.has(other)
    for number in (2, 1):
        assert torch.equal(store.get(kind.key(number), kind.size)[0], kind.rows(number))
    store.drop(one)
    store.drop(one)  # nor is it an error where somebody else was first
    assert not store.has(one) and store.has(other)
    store.close()


@every
def test_an_item_outlives_the_server_and_is_one_models(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    first = opened(name, kind, tmp_path)
    first.put(kind.key(1), kind.rows(1), None)
    first.close()
    other = opened(name, kind, tmp_path, model=b"o" * 16)
    assert other.found == () and not other.has(kind.key(1))
    other.close()
    again = opened(name, kind, tmp_path)
    assert {key for key, _ in again.found} <= {kind.key(1)}
    assert torch.equal(again.get(kind.key(1), kind.size)[0], kind.rows(1))
    again.close()


HARM = (
    *("a value", "cut short", "longer", "empty", "no header", "huge header", "gone"),
    *("another item's", "another model's", "another format's"),
)


@every
@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_not_as_it_was_put_is_removed_and_never_returned(
    name: str, kind: Kind, tmp_path: Path, how: str, restarts: bool
) -> None:
    store = opened(name, kind, tmp_path)
    for number in (1, 2):
        store.put(kind.key(number), kind.rows(number), None)
    file, other = (file_of(kind.rows(number), tmp_path) for number in (1, 2))
    data = bytearray(file.read_bytes())
    match how:
        case "a value":
            data[-7] ^= 4
        case "cut short":
            del data[-3:]
        case "longer":
            data += b"x"
        case "empty":
            data.clear()
        case "no header":
            data[8:12] = b"\xff\xff\xff\xff"
        case "huge header":
            data[:8] = (1 << 60).to_bytes(8, "little")
        case "another item's":
            data = bytearray(other.read_bytes())
        case "another model's":
            data = data.replace(b"m".hex().encode() * 16, b"n".hex().encode() * 16)
        case "another format's":
            data = data.replace(b"saccade-", b"sackade-")
    if data == file.read_bytes():  # of a dummy without a header
        data.pop()
    file.unlink() if how == "gone" else file.write_bytes(data)
    if restarts:
        store.close()
        store = opened(name, kind, tmp_path)
    if store.has(kind.key(1)) or not restarts:
        with pytest.raises(FileNotFoundError if how == "gone" else Damaged):
            store.get(kind.key(1), kind.size)
    assert not store.has(kind.key(1)) and not file.exists()
    assert torch.equal(store.get(kind.key(2), kind.size)[0], kind.rows(2))
    store.close()


@every
def test_an_item_of_another_size_is_damaged(name: str, kind: Kind, tmp_path: Path) -> None:
    store = opened(name, kind, tmp_path)
    store.put(kind.key(1), kind.rows(1), None)
    with pytest.raises(Damaged):
        store.get(kind.key(1), kind.size + 1)
    store.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@every
def test_what_the_machine_refuses_is_an_error_and_leaves_nothing(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    store = opened(name, kind, tmp_path)
    with full_disk(), pytest.raises(OSError):
        store.put(kind.key(1), kind.rows(1), None)
    assert not store.has(kind.key(1)) and not [
        *tmp_path.glob("*/*.tmp"),
        *tmp_path.glob("*/*.draft"),
    ]
    store.put(kind.key(1), kind.rows(1), None)
    assert store.has(kind.key(1))
    store.close()


class Lent:
    """Memory that is counted."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.out, self.given = kind, 0, 0

    def lend(self, count: int) -> torch.Tensor:
        self.out += 1
        return self.kind.items(b"m" * 16).empty(count)

    def give_rows(self, rows: torch.Tensor) -> None:
        assert rows.dtype == self.kind.rows(1).dtype
        self.given += 1


@every
def test_memory_is_given_back_once_it_is_written_or_the_read_has_failed(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    memory = Lent(kind)
    store = opened(name, kind, tmp_path, memory)
    store.put(kind.key(1), kind.rows(1), None)
    assert (memory.out, memory.given) == (0, 1)
    with full_disk(), pytest.raises(OSError):
        store.put(kind.key(2), kind.rows(2), None)
    assert memory.given == 2
    store.get(kind.key(1), kind.size)
    assert (memory.out, memory.given) == (1, 2), "the reader has it now"
    file = file_of(kind.rows(1), tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(Damaged):
        store.get(kind.key(1), kind.size)
    assert memory.given - 2 == memory.out - 1
    store.close()


def test_host_memory_answers_alike() -> None:
    tier, rows = SameMemory(), EMBEDDINGS.rows(1)
    assert not tier.has(EMBEDDINGS.key(1))
    tier.put(EMBEDDINGS.key(1), rows, None)
    assert tier.has(EMBEDDINGS.key(1)) and tier.get(EMBEDDINGS.key(1), 5) == (rows, None)
    tier.drop(EMBEDDINGS.key(1))
    assert not tier.has(EMBEDDINGS.key(1))


# ---- the thread that does a store's work


@every
def test_reads_go_before_all_but_writes_of_the_same_item(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    thread = Background(opened(name, kind, tmp_path))
    for number in (1, 2):
        thread.write(kind.key(number), kind.rows(number))
        thread.begin_read(kind.key(number), kind.size)
    events = thread.collect(wait=True)
    while len(events) < 2:
        events += thread.collect(wait=True)
    assert events == ((kind.key(1), "read"), (kind.key(2), "read")) and not thread.busy
    for number in (2, 1):
        assert torch.equal(thread.take_rows(kind.key(number)), kind.rows(number))
    thread.remove(kind.key(1))
    thread.begin_read(kind.key(1), kind.size)
    assert thread.collect(wait=True) == ((kind.key(1), "missing"),)
    with full_disk():
        thread.write(kind.key(1), kind.rows(1))
        assert thread.collect(wait=True) == ((kind.key(1), "not saved"),)
    thread.close()


def test_what_would_wait_too_long_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PENDING_BYTES", 0)
    thread = Background(opened("disk", PAGES, tmp_path))
    assert not thread.write(PAGES.key(1), PAGES.rows(1)), "the memory stays the caller's"
    assert thread.collect(wait=False) == ((PAGES.key(1), "not saved"),)
    thread.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(tmp_path: Path) -> None:
    thread = Background(opened("disk", PAGES, tmp_path))
    thread.write(PAGES.key(1), torch.empty(1, 5, device="meta"))  # a mistake of ours: no values
    thread.begin_read(PAGES.key(1), 5)
    for wait in (True, False):
        with pytest.raises(RuntimeError, match="disk failed"):
            thread.collect(wait)
    thread.close()


# ---- a whole engine


def test_an_engine_serves_from_a_tier_that_is_one_file(
    answered: Callable[[str], Model], tmp_path: Path
) -> None:
    """Embeddings and pages: nothing names the dummy but its options."""
    model = answered("qwen3_vl")
    folder = str(tmp_path / "embeddings")
    budgets = EmbeddingBudgets(0, 0, 1 << 30, folder, store="shelf")
    pages = PageTierConfig(str(tmp_path / "pages"), 1 << 30, b"i" * 16, store="shelf")
    engine = Harness(model.net, embeddings=budgets, prefix_cache=False)
    for _ in range(2):
        check(model, engine.run([model.request(engine, name) for name in CASES]))
    assert len(engine.encoded) == len(set(engine.encoded)), "nothing is encoded that a tier has"
    assert engine.scheduler.embeddings.hits["disk"] > 0
    engine.close()
    engine = Harness(model.net, kv=KVConfig(pages=pages), kv_pages=40)
    for _ in range(2):
        check(model, engine.run([model.request(engine, name) for name in CASES]))
    assert kept_of(engine.scheduler).tiers["disk"].counts["saved"] > 0
    engine.close()
