"""Loads GGUF files, llama.cpp's format, as checkpoints."""

from saccade.plugin import CheckpointFormat, Checkpoints, Plugin

PLUGIN = Plugin(
    "gguf",
    requires=("quantized",),
    options="saccade.core.settings:CheckpointSettings",
    checkpoints=Checkpoints(
        formats=(
            CheckpointFormat(
                ".gguf",
                folder="saccade.plugins.gguf.folder:resolve_files",
                tensors="saccade.plugins.gguf.tensors:open_gguf",
                stored="saccade.plugins.gguf.blocks:block_tensor",
            ),
        ),
    ),
)
