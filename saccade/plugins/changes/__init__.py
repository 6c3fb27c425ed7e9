"""Changes of a running model: LoRA adapters, new weights, and memory released during sleep."""

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin(
    "changes",
    options="saccade.core.settings:AdapterSettings",
    runtime=Runtime(changes="saccade.plugins.changes.worker_changes:WorkerChanges"),
)
