"""Families of vision-language models other than Qwen-VL, one package each."""

from saccade.plugin import Checkpoints, Plugin

PLUGIN = Plugin("models", checkpoints=Checkpoints(families="saccade.plugins.models"))
