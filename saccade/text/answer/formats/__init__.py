"""Qwen-VL's tool-call formats. Their code is imported when an answer may contain calls."""

from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat

FUNCTION = "<function="

XML = ToolFormat(
    "xml",
    marks=(FUNCTION,),
    order=10,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    code=f"{__name__}.xml:SYNTAX",
)
HERMES = ToolFormat(
    "hermes",
    marks=(OPEN,),
    order=40,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    note="JSON",
    code=f"{__name__}.hermes:SYNTAX",
)
FORMATS = (XML, HERMES)
