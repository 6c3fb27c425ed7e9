"""Families of vision-language models beside Qwen-VL, a folder each."""

from saccade.plugin import Plugin

PLUGIN = Plugin("models", families="saccade.plugins.models")
