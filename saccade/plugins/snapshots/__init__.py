"""Snapshots of sequences' states, which make a prefix cache possible for hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.plugin import Caches, Offer, Plugin, Scheduling

if TYPE_CHECKING:
    from saccade.core.config import EngineConfig
    from saccade.core.family import FamilySpec
    from saccade.sched.parts.step_part import PartContext

PLUGIN = Plugin(
    "snapshots",
    scheduling=Scheduling(
        step_part=Offer(
            "saccade.plugins.snapshots.snapshot_scheduler:SnapshotScheduler",
            "saccade.plugins.snapshots:has_snapshots",
        ),
    ),
    caches=Caches(
        snapshots=Offer(
            "saccade.plugins.snapshots.snapshot_scheduler:build_snapshots",
            "saccade.plugins.snapshots:keeps_states",
        ),
    ),
)


def keeps_states(config: EngineConfig, spec: FamilySpec) -> bool:
    return config.snapshots.count > 0 and spec.kv_spec().state_bytes(config.dtype) > 0


def has_snapshots(context: PartContext) -> bool:
    return context.prefix is not None and context.prefix.snapshots is not None
