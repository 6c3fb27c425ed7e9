"""Rules for the tokens of answers: bans, no repeated n-grams, and reasoning budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import LogitRule, Plugin, Runtime

if TYPE_CHECKING:
    from saccade.core.plan import Open

PLUGIN = Plugin(
    "token_rules",
    runtime=Runtime(
        logit_rules=(
            LogitRule("saccade.plugins.token_rules.row_rules:RowBans.of", f"{__name__}:forbids"),
            LogitRule(
                "saccade.plugins.token_rules.row_rules:RowThinking.of",
                f"{__name__}:thinks",
                last=True,
            ),
        ),
    ),
)


def forbids(opened: Open) -> bool:
    return opened.rules is not None and opened.rules.forbid


def thinks(opened: Open) -> bool:
    return opened.rules is not None and opened.rules.thinking is not None
