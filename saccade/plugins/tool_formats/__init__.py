"""Tool calls as models other than Qwen-VL write them."""

from saccade.plugin import Plugin

PLUGIN = Plugin("tool_formats", tool_formats="saccade.plugins.tool_formats.formats:FORMATS")
