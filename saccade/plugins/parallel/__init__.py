"""Several processes for one model: tensor and expert parallelism."""

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin(
    "parallel",
    options="saccade.core.settings:ParallelSettings",
    runtime=Runtime(collectives="saccade.plugins.parallel.collectives:join"),
)
