"""The tool-call formats of mistral-common's tokenizers."""

from saccade.text.answer.tool_format import ToolFormat

OPEN, ARGUMENTS, IDENTIFIER = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

FORMAT = ToolFormat(
    "mistral",
    marks=(OPEN,),
    order=50,
    opens=OPEN,
    tags=frozenset({OPEN, ARGUMENTS, IDENTIFIER}),
    code=f"{__name__}.call:SYNTAX",
)
