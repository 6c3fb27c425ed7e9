"""Checkpoints in GGUF files, the format of llama.cpp."""

from saccade.plugin import CheckpointFormat, Plugin

PLUGIN = Plugin(
    "gguf",
    options="saccade.core.settings:CheckpointSettings",
    formats=(
        CheckpointFormat(
            ".gguf",
            folder="saccade.plugins.gguf.folder:resolve_files",
            tensors="saccade.plugins.gguf.tensors:open_gguf",
            stored="saccade.plugins.gguf.blocks:block_tensor",
        ),
    ),
)
