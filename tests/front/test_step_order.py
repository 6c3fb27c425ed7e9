"""The order of the steps that prepare requests, and how a plugin's steps find their place in it."""

from __future__ import annotations

import re

import pytest

from saccade.core.errors import ConfigError
from saccade.front.step_order import RULES, sort_rules
from saccade.plugin import StepRule
from saccade.plugins import plugins


def rule(name: str, after: str) -> StepRule:
    return StepRule(name, after, "", "tests.front:Step", "run")


def names(*rules: StepRule) -> list[str]:
    return [each.name for each in sort_rules(rules)]


def test_what_refuses_for_less_comes_first() -> None:
    rules = [*RULES, *(each for plugin in plugins() for each in plugin.requests.steps)]
    assert names(*rules) == [
        "computer.begin",
        "form.choose",
        "cache.check",
        "media.check",
        "rules.length",
        "agents.length",
        "text",
        "rules.check",
        "files",
        "grammar.compile",
        "media.open",
        "messages.sizes",
        "computer.place",
        "form.complete",
        "grammar.complete",
        "agents.edit",
        "agents.session",
        "prompt",
        "cache.set",
        "text.ignored",
        "rules.apply",
        "limits",
        "text.predict",
    ]


def test_a_step_stands_behind_what_it_follows_wherever_its_rule_comes() -> None:
    rules = [rule("b", "a"), rule("late", "prompt"), rule("c", "b"), rule("a", "text")]
    assert names(*rules) == ["a", "b", "c", "late"]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            [rule("tides.ebb", "flow")],
            "plugin tides: its step tides.ebb follows flow, which does not exist",
        ),
        (
            [rule("tides.a", "tides.b"), rule("tides.b", "tides.a")],
            "follows tides.b, which does not exist",
        ),
    ],
    ids=["unknown", "circle"],
)
def test_a_step_that_has_no_place_is_an_error_at_start(given: list[StepRule], fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        sort_rules([*RULES, *given])
