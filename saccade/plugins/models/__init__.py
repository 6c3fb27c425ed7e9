"""Families of vision-language models other than Qwen-VL, one package each."""

from saccade.plugin import Plugin

PLUGIN = Plugin("models", families="saccade.plugins.models")
