"""Ten thousand requests with real tensors, while KV leaves the pool and every tier all the time and
files are harmed: each answer is transformers'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.core.config import KVConfig, PageTierConfig
from saccade.core.plan import PageTier
from saccade.core.types import Request, SamplingParams
from saccade.plugins.tiers.page_arrivals import NONE, Bytes, ReadRates
from tests.families.answers import CASES, Case, Model, reference_answer
from tests.fixtures.harness import Harness
from tests.helpers.page_tiers import arrivals_of, kept_of
from tests.plugins.tiers.test_kept_answers import HARM, MODEL, files, harm

REQUESTS, CHATS, SALTS, SIDE_BY_SIDE = 10_000, 48, ("", "another tenant"), 8
MAX_ANSWER = 6
UNHARMED = 8
"""Rounds between files harmed."""


class Whims(ReadRates):
    """Reading pays, now and then not."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def pays(self, tokens: int, nbytes: Bytes, measured: Mapping[PageTier, float] = NONE) -> bool:
        return self._chance.random() < 0.95


def chats(chance: random.Random) -> Sequence[Case]:
    """Prompts of two to four parts that begin alike and go on differently."""
    parts, drawn = [*CASES.values()], list[Case]()
    while len(drawn) < CHATS:
        few = [parts[min(int(chance.expovariate(0.6)), 7)] for _ in range(chance.randint(2, 4))]
        prompt = " ".join(part.prompt for part in few)
        chat = Case(prompt, tuple(size for part in few for size in part.pictures))
        if chat not in drawn:
            drawn.append(chat)
    return drawn


def small_engine(model: Model, folder: Path, longest: int) -> Harness:
    """Room for hardly more than one of the longest prompts on the device, for half of one in host
    memory, and for eight on disk.
    """
    size = 16
    spec = model.net.spec.kv_spec()
    page, state = size * spec.token_bytes("float32"), spec.state_bytes("float32")
    pages = -(-(longest + MAX_ANSWER) // size)
    each = pages * page + (state > 0) * 4 * state
    tiers = PageTierConfig(str(folder), 8 * each, MODEL, host_bytes=each // 2)
    return Harness(
        model.net,
        kv=KVConfig(pages=tiers),
        page_size=size,
        kv_pages=pages + pages // 4,
        chunk_tokens=64,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_ten_thousand_requests_under_constant_eviction(
    family: str,
    answered: Callable[[str], Model],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = answered(family)
    chance = random.Random(0)
    cases = {f"chat {number}": case for number, case in enumerate(chats(chance))}
    answers = {name: reference_answer(model, case) for name, case in cases.items()}
    plain = Harness(model.net)
    longest = max(len(ask(model, plain, case).tokens) for case in cases.values())
    engine = small_engine(model, tmp_path / "kv", longest)
    arrivals_of(engine.scheduler).rates = Whims(chance)
    known = {name: ask(model, engine, case) for name, case in cases.items()}
    wrong = asked = 0
    for turn in range(REQUESTS // SIDE_BY_SIDE):
        names = [
            f"chat {min(int(chance.paretovariate(0.7)) - 1, CHATS - 1)}"
            for _ in range(SIDE_BY_SIDE)
        ]
        requests = [
            replace(
                known[name],
                id=f"{name}#{place}",
                cache_salt=chance.choice(SALTS),
                sampling=SamplingParams(max_tokens=chance.randint(1, MAX_ANSWER), ignore_eos=True),
            )
            for place, name in enumerate(names)
        ]
        for id, outcome in engine.run(requests).items():
            expected = answers[id.split("#")[0]][: len(outcome.tokens)]
            wrong += not expected or outcome.tokens != expected or outcome.finish != ["length"]
            asked += 1
        if turn % UNHARMED == 0:
            found = [path for path in files(tmp_path / "kv") if whole(path)]
            for one, other in zip(found[::8], found[4::8]):
                with suppress(FileNotFoundError, IndexError):  # a thread removes some meanwhile
                    harm(one, chance.choice(HARM), other)
    tiers, prefix = kept_of(engine.scheduler).tiers, engine.scheduler.prefix
    assert prefix is not None
    counts = {place: dict(tier.counts) for place, tier in tiers.items()}
    with capsys.disabled():
        print(f"\n{family}: {asked} requests, {wrong} wrong; {prefix.evictions} pages evicted;")
        print(counts)
    assert (wrong, asked) == (0, REQUESTS)
    assert prefix.evictions > REQUESTS
    assert tiers["host"].counts["read"] > REQUESTS // 10
    assert tiers["disk"].counts["read"] > REQUESTS // 10
    assert tiers["disk"].counts["damaged"] > 0 and tiers["disk"].counts["missing"] > 0
    engine.close()


def whole(path: Path) -> bool:
    """False for what was harmed before, and for what has just been removed."""
    with suppress(FileNotFoundError):
        return path.is_file() and path.stat().st_size > 1
    return False


def ask(model: Model, harness: Harness, case: Case) -> Request:
    images = [
        harness.image(pixels, f"{size}") for size, pixels in zip(case.pictures, model.pixels(case))
    ]
    return harness.request("", model.tokens(case), images)
