"""Describes the formats as data, which every server reads, with the templates by which each format
is recognized.
"""

from __future__ import annotations

from saccade.text.answer.reasoning import Tags
from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat

KEY, KEY_END = "<arg_key>", "</arg_key>"
CALL_OPEN, CALL_CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CHANNEL = Tags("<|channel>", "<channel|>", "thought", name="channel")
TOOL_CALLS, ARGUMENTS, IDENTIFIER = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"

FORMATS = (
    ToolFormat(
        "glm",
        marks=(KEY,),
        order=20,
        opens=OPEN,
        tags=frozenset({OPEN, CLOSE}),
        code="saccade.plugins.tool_formats.glm:SYNTAX",
    ),
    ToolFormat(
        "gemma",
        marks=(CALL_OPEN,),
        order=30,
        opens=CALL_OPEN,
        tags=frozenset({CALL_OPEN, CALL_CLOSE, QUOTE}),
        thoughts=CHANNEL,
        code="saccade.plugins.tool_formats.gemma.syntax:SYNTAX",
    ),
    ToolFormat(
        "mistral",
        marks=(TOOL_CALLS,),
        order=50,
        opens=TOOL_CALLS,
        tags=frozenset({TOOL_CALLS, ARGUMENTS, IDENTIFIER}),
        code="saccade.plugins.tool_formats.mistral:SYNTAX",
    ),
    ToolFormat(
        "llama3",
        marks=('"parameters": dictionary of argument name',),
        order=60,
        opens=PYTHON_TAG,
        tags=frozenset({PYTHON_TAG}),
        bare=True,
        code="saccade.plugins.tool_formats.llama3:SYNTAX",
    ),
)
