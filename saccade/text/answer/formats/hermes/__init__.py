"""The JSON tool-call format of Qwen2.5, Qwen3-VL and others."""

from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat

FORMAT = ToolFormat(
    "hermes",
    marks=(OPEN,),
    order=40,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    note="JSON",
    code=f"{__name__}.call:SYNTAX",
)
