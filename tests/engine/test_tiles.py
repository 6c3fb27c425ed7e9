"""Tiles in the engine: the tower sees each tile once, and answers stay transformers', token for
token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.config import EmbeddingBudgets, EncoderMode, KVConfig, PageTierConfig
from saccade.core.family import CanvasTile, FamilySpec
from saccade.core.types import Request
from saccade.families.kit.base_spec import BaseSpec
from saccade.nn.protocol import GridFacts
from saccade.plugins.tiers.page_arrivals import ReadRates
from saccade_bench.lab.qwen import Gridded, tell_grid, told_grid
from tests.families.answers import Model, load
from tests.fixtures.harness import Harness, Outcome
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import make_checkpoint, picture, tinies
from tests.helpers.page_tiers import arrivals_of, kept_of

NEW_TOKENS = 12
SIZE = (240, 320)
SPOTS = ((20, 20), (200, 300), (120, 160))
"""Where pictures of one desktop differ: in the first tiles, in the last, in the middle."""
PROMPT = "look: @ how many red circles are there?"


@dataclass(frozen=True)
class Desktop:
    """A model whose tower sees tiles apart, and pictures that differ in a few tiles."""

    model: Model

    @property
    def spec(self) -> FamilySpec:
        return self.model.net.spec

    def shot(self, *spots: int, size: tuple[int, int] = SIZE) -> np.ndarray:
        """A resized picture, with marks at the `spots`."""
        drawn = picture(*size, seed=3).copy()
        for spot in spots:
            top, left = SPOTS[spot]
            drawn[top : top + 12, left : left + 12] = 255 - drawn[top : top + 12, left : left + 12]
        return self.model.reference.resize(drawn)

    def like(self, canvas: np.ndarray, other: np.ndarray) -> np.ndarray:
        """A canvas that has the grid of another."""
        layout = self.spec.images if isinstance(self.spec, BaseSpec) else self.spec
        return canvas if isinstance(layout, Gridded) else tell_grid(canvas, told_grid(other))

    def tiles(self, shot: np.ndarray, harness: Harness) -> tuple[CanvasTile, ...]:
        assert self.spec.tiles is not None
        return self.spec.tiles.tiles(harness.image(shot, "size").grid)

    def contents(self, shot: np.ndarray, harness: Harness) -> list[tuple[object, bytes]]:
        """What each tile is to the tower."""
        return [
            (tile.grid, shot[tile.window.slices].tobytes()) for tile in self.tiles(shot, harness)
        ]

    def new(self, shots: Sequence[np.ndarray], harness: Harness) -> int:
        """How many tiles there are, each counted once."""
        return len({each for shot in shots for each in self.contents(shot, harness)})

    def ask(self, harness: Harness, name: str, *shots: np.ndarray, **more: object) -> Request:
        prompt = PROMPT.replace("@", self.model.reference.placeholder * len(shots))
        images = [harness.image(shot, f"{name.split('#')[0]}.{i}") for i, shot in enumerate(shots)]
        tokens = self.model.tokenizer.encode(prompt).ids
        return harness.request(name, tokens, images, max_tokens=NEW_TOKENS, **more)

    def answer(self, request: Request, *shots: np.ndarray) -> Sequence[int]:
        self.model.reference.go_on()
        tokens, shown = request.tokens, list(shots)
        return self.model.reference.generate(tokens, shown, max_new_tokens=NEW_TOKENS)


TILED = tuple(name for name, tiny in tinies().items() if tiny.tiled)


@pytest.fixture(scope="module", params=TILED)
def desktop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Desktop:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiles"), request.param)
    return Desktop(load(folder, ()))


def run(harness: Harness, *requests: Request) -> dict[str, Outcome]:
    found = dict(harness.run(requests))
    assert all(each.error is None for each in found.values())
    return found


def counts(harness: Harness) -> tuple[int, int]:
    """Tiles run through the tower, and tiles copied."""
    found = harness.scheduler.counts
    return found.tiles_new, found.tiles_seen


def test_a_tile_that_another_picture_has_is_not_encoded_again(desktop: Desktop) -> None:
    harness = Harness(desktop.model.net)
    shots = [desktop.shot(), desktop.shot(0), desktop.shot(0, 1)]
    for number, shot in enumerate(shots):
        asked = desktop.ask(harness, f"shot {number}", shot)
        assert run(harness, asked)[asked.id].tokens == desktop.answer(asked, shot), number
        every = sum(len(desktop.tiles(each, harness)) for each in shots[: number + 1])
        new = desktop.new(shots[: number + 1], harness)
        assert counts(harness) == (new, every - new)
    assert new < every, "they share most tiles"
    patches = harness.scheduler.counts.patches_encoded
    assert patches < sum(harness.image(shot, "size").num_patches for shot in shots)


ROOMY: Mapping[str, dict[str, Any]] = {
    "at once": {},
    "in small chunks": {"chunk_tokens": 13, "page_size": 4},
    "in parts": {"tower_budget": 40},
    "without a prefix cache": {"prefix_cache": False},
    "two abreast": {"encode_patches": 1, "max_running": 2},
}


@pytest.mark.once("desktop")
@pytest.mark.parametrize("name", ROOMY)
def test_pictures_that_share_tiles_in_one_batch(desktop: Desktop, name: str) -> None:
    """All but one tile, and the whole picture, which is never the same."""
    harness = Harness(desktop.model.net, **ROOMY[name])
    one, two, three = desktop.shot(), desktop.shot(1), desktop.shot(1, 2)
    shown = {"a": (one,), "b": (two,), "both": (one, two), "all": (three, one, two, one)}
    asked = {id: desktop.ask(harness, id, *shots) for id, shots in shown.items()}
    found = harness.run(list(asked.values()), depth=2)
    for id, shots in shown.items():
        assert found[id].tokens == desktop.answer(asked[id], *shots), id
    assert counts(harness)[0] == desktop.new((one, two, three), harness), "each tile once"
    before = counts(harness)
    again = run(harness, *(desktop.ask(harness, f"{id}#2", *shots) for id, shots in shown.items()))
    assert all(again[f"{id}#2"].tokens == found[id].tokens for id in shown)
    assert counts(harness) == before, "a seen picture is not looked at"


def room(desktop: Desktop, pictures: float) -> int:
    """Bytes of so many embeddings."""
    harness = Harness(desktop.model.net)
    tokens = harness.image(desktop.shot(), "size").num_tokens
    return int(pictures * tokens * desktop.spec.embedding_width * 4)


@pytest.mark.once("desktop")
@pytest.mark.parametrize("name", ["none", "one", "one, and two on the host", "two"])
def test_tiles_go_with_the_pictures_that_have_them(desktop: Desktop, name: str) -> None:
    """Evicted between, and while others that share tiles are under way."""
    budgets = {
        "none": EmbeddingBudgets(1),
        "one": EmbeddingBudgets(room(desktop, 1.2)),
        "one, and two on the host": EmbeddingBudgets(room(desktop, 1.2), room(desktop, 2.2)),
        "two": EmbeddingBudgets(room(desktop, 2.2)),
    }
    harness = Harness(desktop.model.net, embeddings=budgets[name], chunk_tokens=64)
    shots = [desktop.shot(), desktop.shot(0), desktop.shot(1), desktop.shot(0, 1)]
    waves = [[0], [1], [2, 0], [3, 1, 2], [0, 0], [3, 2, 1, 0]]
    for number, wave in enumerate(waves):
        shown = {f"{number}.{place}": shots[which] for place, which in enumerate(wave)}
        asked = {id: desktop.ask(harness, id, shot) for id, shot in shown.items()}
        found = harness.run(list(asked.values()), depth=2)
        for id, shot in shown.items():
            assert found[id].error is None and found[id].tokens == desktop.answer(asked[id], shot)
    if name in ("one, and two on the host", "two"):
        assert counts(harness)[1] > 0


@pytest.mark.once("desktop")
def test_preempted_pictures_share_tiles(desktop: Desktop) -> None:
    calm = Harness(desktop.model.net)
    shown = {"a": desktop.shot(), "b": desktop.shot(0), "c": desktop.shot(0, 1)}
    asked = {id: desktop.ask(calm, id, shot) for id, shot in shown.items()}
    longer = replace(asked["a"].sampling, max_tokens=3 * NEW_TOKENS)
    asked = {id: replace(each, sampling=longer) for id, each in asked.items()}
    harness = Harness(
        desktop.model.net,
        page_size=2,
        kv_pages=len(asked["a"].tokens) + NEW_TOKENS,  # for two prompts, and some of two answers
        embeddings=EmbeddingBudgets(room(desktop, 1.2)),
    )
    harness.pixels = calm.pixels
    found = harness.run(list(asked.values()))
    assert harness.scheduler.counts.preemptions > 0
    for id, shot in shown.items():
        wanted = desktop.answer(asked[id], shot)
        assert found[id].tokens[: len(wanted)] == wanted, id


@pytest.mark.parametrize("what", ["salt", "settings"])
def test_tiles_of_others_never_meet(desktop: Desktop, what: str) -> None:
    """Two tenants' screens, and one screen in two sizes."""
    harness = Harness(desktop.model.net)
    shot = desktop.shot()
    every = len(desktop.tiles(shot, harness))
    for number in range(2):
        asked = desktop.ask(harness, f"one {number}", shot)
        key = asked.images[0].key
        salted, settled = (
            replace(key, salt="b" * number),
            replace(key, settings=bytes([number]) * 16),
        )
        other = salted if what == "salt" else settled
        harness.pixels[other] = harness.pixels[key]
        asked = replace(asked, images=(replace(asked.images[0], key=other),), cache_salt=other.salt)
        assert run(harness, asked)[asked.id].tokens == desktop.answer(asked, shot)
    own = desktop.new([shot], harness)
    assert counts(harness) == (2 * own, 2 * (every - own))


def salted(desktop: Desktop, harness: Harness, name: str, salt: str, shot: np.ndarray) -> Request:
    """Another tenant's request."""
    asked = desktop.ask(harness, name, shot)
    key = replace(asked.images[0].key, salt=salt)
    harness.pixels[key] = harness.pixels[asked.images[0].key]
    return replace(asked, images=(replace(asked.images[0], key=key),), cache_salt=salt)


@pytest.mark.once("desktop")
def test_tenants_in_one_batch_share_neither_tiles_nor_keys(desktop: Desktop) -> None:
    harness = Harness(desktop.model.net, page_size=2)
    shots = {"one": desktop.shot(), "two": desktop.shot(1)}
    asked = {
        f"{name} of {salt}": salted(desktop, harness, f"{name} of {salt}", salt, shot)
        for name, shot in shots.items()
        for salt in ("a", "b")
    }
    found = harness.run([*asked.values()], depth=2)
    for id, request in asked.items():
        assert found[id].tokens == desktop.answer(request, shots[id.split()[0]]), id
    own = desktop.new([*shots.values()], harness)
    assert counts(harness)[0] == 2 * own, "each tile once for each tenant"
    late = salted(desktop, harness, "late", "c", shots["two"])
    outcome = run(harness, late)["late"]
    assert outcome.cached_tokens == 0 and outcome.tokens == desktop.answer(late, shots["two"])
    assert counts(harness)[0] == 2 * own + desktop.new([shots["two"]], harness)


@pytest.mark.once("desktop")
@pytest.mark.parametrize("depth", [1, 2])
def test_all_tiles_but_one_in_one_batch(desktop: Desktop, depth: int) -> None:
    """Pictures that differ in one tile, each in another, and in nothing else."""
    harness = Harness(desktop.model.net, chunk_tokens=64)
    base = desktop.shot()
    tiles = desktop.tiles(base, harness)
    shots = [base]
    for tile in (tiles[0], tiles[len(tiles) // 2], tiles[-1]):
        other = base.copy()
        window = other[tile.window.slices]
        window[:4, :4] = 255 - window[:4, :4]
        shots.append(desktop.like(other, base))
    asked = [desktop.ask(harness, f"shot {place}", shot) for place, shot in enumerate(shots)]
    found = harness.run(asked, depth=depth)
    for request, shot in zip(asked, shots):
        assert found[request.id].tokens == desktop.answer(request, shot), request.id
    every = len(tiles) * len(shots)
    new = desktop.new([base], harness) + len(shots) - 1
    assert counts(harness) == (new, every - new)


def test_a_picture_without_names_goes_through_the_tower_whole(desktop: Desktop) -> None:
    harness = Harness(desktop.model.net)
    harness.names_tiles = False
    one, two = desktop.shot(), desktop.shot(0)
    for id, shot in (("a", one), ("b", two)):
        asked = desktop.ask(harness, id, shot)
        assert run(harness, asked)[id].tokens == desktop.answer(asked, shot)
    assert counts(harness) == (0, 0)


def test_a_flush_forgets_tiles(desktop: Desktop) -> None:
    harness = Harness(desktop.model.net)
    shot = desktop.shot()
    run(harness, desktop.ask(harness, "a", shot))
    harness.scheduler.flush(embeddings=True)
    new, _ = counts(harness)
    run(harness, desktop.ask(harness, "b", desktop.shot(0)))
    assert counts(harness)[0] - new == desktop.new([desktop.shot(0)], harness)


@pytest.mark.once("desktop")
def test_who_waits_for_tiles_of_a_picture_that_fails_encodes_them(
    desktop: Desktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(desktop.model.net)
    one, two = desktop.shot(), desktop.shot(0)
    asked = {"a": desktop.ask(harness, "a", one), "b": desktop.ask(harness, "b", two)}
    wanted = desktop.answer(asked["b"], two)
    embed, left = desktop.model.net.vision.embed, [True]

    def fails_once(pixels: torch.Tensor, facts: GridFacts) -> torch.Tensor:
        if left:
            left.clear()
            raise TypeError("of a test")
        return embed(pixels, facts)

    monkeypatch.setattr(
        type(desktop.model.net.vision), "embed", lambda _, *given: fails_once(*given)
    )
    found = harness.run(list(asked.values()), depth=2)
    assert "of a test" in (found["a"].error or "")
    assert found["b"].error is None and found["b"].tokens == wanted
    assert counts(harness)[0] == sum(desktop.new([each], harness) for each in (one, two))


@pytest.mark.more
@pytest.mark.parametrize("encoder", ["weights", "data"])
@pytest.mark.parametrize("family", ["internvl", "deepseek_vl_v2"])
def test_ranks_share_tiles(tmp_path: Path, family: str, encoder: EncoderMode) -> None:
    folder = make_checkpoint(tmp_path, family)
    desktop = Desktop(load(folder, ()))
    harness = Harness(desktop.model.net, ThreadRankGroup(folder, 2, encoder))
    shots = [desktop.shot(), desktop.shot(0), desktop.shot(0, 1)]
    for number, shot in enumerate(shots):
        asked = desktop.ask(harness, f"shot {number}", shot)
        assert run(harness, asked)[asked.id].tokens == desktop.answer(asked, shot), number
    assert counts(harness)[0] == desktop.new(shots, harness)


FIRST = ("internvl", "qianfan_ocr", "smolvlm", "idefics3", "step3_vl", "lfm2_vl")
"""Families whose tiles come before the whole picture."""


def leading(desktop: Desktop, harness: Harness, one: np.ndarray, other: np.ndarray) -> int:
    """Rows of the embedding before the first that two pictures do not share."""
    first, second = desktop.contents(one, harness), desktop.contents(other, harness)
    tiles = desktop.tiles(one, harness)
    return min(tile.rows[0].start for tile, a, b in zip(tiles, first, second) if a != b)


def token_of(request: Request, row: int) -> int:
    """The position in the prompt of a row of a picture's embedding."""
    spans = request.spans
    return next(s.start + row - s.offset for s in spans if s.offset <= row < s.offset + s.length)


@pytest.mark.parametrize("page_size", [2, 5])
def test_keys_and_values_of_first_tiles_are_shared(desktop: Desktop, page_size: int) -> None:
    """In one place of a prompt: as much as the pictures begin alike, and no more."""
    harness = Harness(desktop.model.net, page_size=page_size, chunk_tokens=64)
    one, two, other = desktop.shot(), desktop.shot(1), desktop.shot(0)
    cached = {}
    for id, shot in (("one", one), ("two", two), ("other", other), ("two#2", two)):
        asked = desktop.ask(harness, id, shot)
        outcome = run(harness, asked)[id]
        assert outcome.tokens == desktop.answer(asked, shot), id
        cached[id] = outcome.cached_tokens
        harness.scheduler.audit()
    span = asked.spans[0].start
    rows = leading(desktop, harness, one, two)
    assert bool(rows) == (desktop.spec.family in FIRST)
    if rows and not desktop.spec.kv_spec().state_bytes("float32"):
        alike = token_of(asked, rows)
        assert cached["two"] == alike // page_size * page_size > span
    else:  # a state is known where it was saved, which is not between tiles
        assert cached["two"] <= span
    assert cached["other"] <= max(span, cached["two"])
    assert cached["two#2"] == (len(asked.tokens) - 1) // page_size * page_size


@pytest.mark.once("desktop")
def test_shared_keys_and_values_go_and_come(desktop: Desktop) -> None:
    """Few pages, many pictures in turns, several at once, and tenants between."""
    shots = [
        desktop.shot(),
        desktop.shot(1),
        desktop.shot(2),
        desktop.shot(0, 1),
        desktop.shot(1, 2),
    ]
    long = len(desktop.ask(Harness(desktop.model.net), "x", shots[0]).tokens) + NEW_TOKENS
    harness = Harness(desktop.model.net, page_size=2, kv_pages=3 * long // 2 + 8, chunk_tokens=48)
    wanted = {}
    for place, shot in enumerate(shots):
        wanted[place] = desktop.answer(desktop.ask(harness, "x", shot), shot)
    draw = random.Random(7)
    for wave in range(8):
        picked = [draw.randrange(len(shots)) for _ in range(3)]
        asked = [
            desktop.ask(harness, f"{which}#{wave}.{place}", shots[which])
            for place, which in enumerate(picked)
        ]
        outcomes = harness.run(asked, depth=2)
        for request, which in zip(asked, picked):
            assert outcomes[request.id].tokens == wanted[which]
        if wave == 5:
            harness.scheduler.flush(embeddings=True)


class Unmeasured(ReadRates):
    """However quick a tiny model computes, reads are waited for."""

    def computed(self, tokens: int, seconds: float) -> None: ...


def tiered(desktop: Desktop, tiers: PageTierConfig) -> Harness:
    """An engine whose pages leave the pool for other tiers."""
    harness = Harness(desktop.model.net, kv=KVConfig(pages=tiers), page_size=2, chunk_tokens=64)
    arrivals_of(harness.scheduler).rates = Unmeasured()
    return harness


def evict(harness: Harness, left: int = 0) -> None:
    """Every page, but for so many of the first."""
    prefix = harness.scheduler.prefix
    assert prefix is not None
    prefix.evict(prefix.evictable - left)
    harness.run([])


@pytest.mark.parametrize("family", ["internvl", pytest.param("smolvlm", marks=pytest.mark.more)])
def test_pages_of_shared_tiles_leave_the_pool_and_come_back(tmp_path: Path, family: str) -> None:
    """Also for a picture that shows them for the first time."""
    desktop = Desktop(load(make_checkpoint(tmp_path / "model", family), ()))
    harness = tiered(desktop, PageTierConfig(None, 0, b"sixteen bytes of", host_bytes=1 << 24))
    one, two = desktop.shot(), desktop.shot(1)
    changed = one.copy()
    changed[desktop.tiles(one, harness)[-1].window.slices][:4, :4] ^= 255
    three = desktop.like(changed, one)

    def ask(id: str, shot: np.ndarray) -> Outcome:
        asked = desktop.ask(harness, id, shot)
        outcome = run(harness, asked)[id]
        assert outcome.tokens == desktop.answer(asked, shot), id
        harness.scheduler.audit()
        return outcome

    ask("one", one)
    shared = ask("two", two).cached_tokens
    request = desktop.ask(harness, "two", two)
    start, whole = request.spans[0].start, (len(request.tokens) - 1) // 2 * 2
    assert start < shared < whole, "keys and values of the first tiles"
    evict(harness)
    assert ask("two", two).cached_tokens == whole
    assert ask("one", one).cached_tokens == whole
    evict(harness, left=start // 2)
    alike = token_of(request, leading(desktop, harness, one, three))
    assert ask("three", three).cached_tokens == alike // 2 * 2 >= shared
    tiers = kept_of(harness.scheduler).tiers
    assert sum(tier.counts["read"] for tier in tiers.values()) > 0
    harness.close()


@pytest.mark.parametrize("host", [0, 1 << 24])
def test_beside_a_disk_pages_are_an_images_own(tmp_path: Path, host: int) -> None:
    """A restart, which forgets tiles, finds all of them."""
    desktop = Desktop(load(make_checkpoint(tmp_path / "model", "internvl"), ()))
    tiers = PageTierConfig(str(tmp_path / "pages"), 1 << 30, b"sixteen bytes of", host_bytes=host)
    one = desktop.shot()
    for restarted in (False, True):
        harness = tiered(desktop, tiers)
        for id, shot in (("one", one), ("two", desktop.like(desktop.shot(1), one))):
            asked = desktop.ask(harness, id, shot)
            outcome = run(harness, asked)[id]
            assert outcome.tokens == desktop.answer(asked, shot), id
            start, whole = asked.spans[0].start, (len(asked.tokens) - 1) // 2 * 2
            if restarted:
                assert outcome.cached_tokens == whole
            else:
                assert outcome.cached_tokens <= start
            harness.scheduler.audit()
        assert bool(harness.encoded) != restarted
        evict(harness)  # before the server is idle, when it would be saved
        harness.close()
