"""The tool-call format that the chat templates of Llama 3.1 to 3.3 request."""

from saccade.text.answer.tool_format import ToolFormat

TAG = "<|python_tag|>"

FORMAT = ToolFormat(
    "llama3",
    marks=('"parameters": dictionary of argument name',),
    order=60,
    opens=TAG,
    tags=frozenset({TAG}),
    bare=True,
    code=f"{__name__}.call:SYNTAX",
)
