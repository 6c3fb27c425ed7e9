"""Tool-call formats of models other than Qwen-VL."""

from saccade.plugin import Plugin, Requests

PLUGIN = Plugin(
    "tool_formats", requests=Requests(tool_formats="saccade.plugins.tool_formats.formats:FORMATS")
)
