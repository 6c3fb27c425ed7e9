"""Runs one model in several processes, with tensor or expert parallelism."""

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin(
    "parallel",
    options="saccade.core.settings:ParallelSettings",
    runtime=Runtime(collectives="saccade.plugins.parallel.collectives:join"),
)
