"""Several processes for one model: tensor and expert parallelism."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "parallel",
    options="saccade.core.settings:ParallelSettings",
    collectives="saccade.plugins.parallel.collectives:join",
)
