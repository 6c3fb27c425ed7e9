"""A scheduler has the parts that options ask for, and no object of the others; a request joins the
parts that it names.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import FunctionType, ModuleType

import pytest

from saccade.core.config import Hardware
from saccade.core.model_folder import DEMO
from saccade.core.options import EngineOptions, ModelOptions
from saccade.core.plan import StepResult
from saccade.core.settings import EngineSettings, TierSettings
from saccade.core.types import Caching, Request, SamplingParams
from saccade.engine.schedulers import build_scheduler
from saccade.engine.sizing import resolve
from saccade.families.registry import load_spec
from saccade.sched.scheduler import GenerationScheduler

GIB = 1 << 30
DEFAULT = EngineSettings()
MACHINE = Hardware("cpu", "2 threads", 8 * GIB, 8 * GIB)
REQUEST = Request("a", tuple(range(40)), (), (), SamplingParams(max_tokens=3, ignore_eos=True))
CONTROL = {"CacheControlTracker", "PromptHistory", "CachedPrompt", "_Remembered"}
GUESSES = {"SpeculativeDecoding", "Drafter", "StepCosts"}
TIERS = {"PageArrivals", "ReadRates", "OffloadedPages", "CacheTierState"}
ALWAYS = {"Parts", "PartContext"}
"""What has the parts."""


def demo(drafts: int = 0, settings: EngineSettings = DEFAULT) -> GenerationScheduler:
    """The demo's scheduler, as a server with these options builds it."""
    spec = load_spec(DEMO)
    config = resolve(ModelOptions(), EngineOptions(), spec, "float32", MACHINE, settings=settings)
    return build_scheduler(config, spec, drafts=drafts)


def objects_of_parts(scheduler: GenerationScheduler) -> set[str]:
    """The classes of `sched.parts` and plugins that any object reached from the scheduler has."""
    found, todo, seen = set(), [scheduler], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if type(each).__module__.startswith(("saccade.sched.parts.", "saccade.plugins.")):
            found.add(type(each).__name__)
        todo += gc.get_referents(each)
    return found


def step(scheduler: GenerationScheduler) -> None:
    plan = scheduler.plan()
    drawn = sum(row.sample for row in plan.rows)
    scheduler.apply(StepResult(plan.step, (7,) * drawn))


@pytest.mark.parametrize(
    "drafts, settings, parts",
    [
        (0, DEFAULT, set()),
        (7, DEFAULT, GUESSES),
        (0, EngineSettings(tiers=TierSettings(kv_cache_host_mb=64)), TIERS),
    ],
    ids=["default", "guesses", "pages in host memory"],
)
def test_a_part_that_is_off_has_no_object(
    drafts: int, settings: EngineSettings, parts: set[str]
) -> None:
    assert objects_of_parts(demo(drafts, settings)) == ALWAYS | parts


def test_a_request_has_no_object_of_a_part_that_it_does_not_name() -> None:
    scheduler = demo()
    scheduler.add_request(REQUEST)
    step(scheduler)
    step(scheduler)
    assert len(scheduler.running) == 1 and objects_of_parts(scheduler) == ALWAYS
    asks = replace(REQUEST, id="b", caching=Caching(breakpoints=((32, 300),)))
    scheduler.add_request(asks)
    step(scheduler)
    assert objects_of_parts(scheduler) == ALWAYS | CONTROL
