"""The XML tool-call format of Qwen3.5."""

from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat

FUNCTION = "<function="

FORMAT = ToolFormat(
    "xml",
    marks=(FUNCTION,),
    order=10,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    code=f"{__name__}.call:SYNTAX",
)
