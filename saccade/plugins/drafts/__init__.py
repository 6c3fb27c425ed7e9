"""Speculative decoding. Draft tokens are from earlier answers, the prompt, or an MTP head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Offer, Plugin, Scheduling

if TYPE_CHECKING:
    from saccade.sched.parts.step_part import PartContext

PLUGIN = Plugin(
    "drafts",
    options="saccade.core.settings:DraftSettings",
    scheduling=Scheduling(
        step_part=Offer(
            "saccade.plugins.drafts.speculative:SpeculativeDecoding",
            "saccade.plugins.drafts:drafts",
        ),
    ),
)


def drafts(context: PartContext) -> bool:
    return context.limits.drafts.tokens > 0
