"""Changes a running model: loads LoRA adapters and new weights, and releases memory during
sleep.
"""

from saccade.plugin import Plugin, Runtime

PLUGIN = Plugin(
    "changes",
    options="saccade.core.settings:AdapterSettings",
    runtime=Runtime(changes="saccade.plugins.changes.worker_changes:WorkerChanges"),
)
