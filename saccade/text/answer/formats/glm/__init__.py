"""The tool-call format of GLM-4.5, GLM-4.6 and their vision models."""

from saccade.text.answer.tool_format import CLOSE, OPEN, ToolFormat

KEY, KEY_END = "<arg_key>", "</arg_key>"

FORMAT = ToolFormat(
    "glm",
    marks=(KEY,),
    order=20,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE}),
    code=f"{__name__}.call:SYNTAX",
)
