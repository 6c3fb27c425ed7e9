"""Changes of a running model: LoRA adapters, new weights, and memory released during sleep."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "changes",
    options="saccade.core.settings:AdapterSettings",
    changes="saccade.plugins.changes.worker_changes:WorkerChanges",
)
