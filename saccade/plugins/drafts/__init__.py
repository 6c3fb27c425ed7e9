"""Draft tokens: speculative decoding from earlier answers, the prompt, or the model's MTP head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Offer, Plugin

if TYPE_CHECKING:
    from saccade.sched.parts.step_part import PartContext

PLUGIN = Plugin(
    "drafts",
    options="saccade.core.settings:DraftSettings",
    step_part=Offer(
        "saccade.plugins.drafts.speculative:SpeculativeDecoding", "saccade.plugins.drafts:drafts"
    ),
)


def drafts(context: PartContext) -> bool:
    return context.limits.drafts.tokens > 0
