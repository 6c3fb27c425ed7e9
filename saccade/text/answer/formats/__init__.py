"""The tool formats of Qwen-VL, as data. Their code is imported once an answer may have calls."""

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
