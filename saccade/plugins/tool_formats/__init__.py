"""Tool-call formats of models other than Qwen-VL."""

from saccade.plugin import Plugin

PLUGIN = Plugin("tool_formats", tool_formats="saccade.plugins.tool_formats.formats:FORMATS")
