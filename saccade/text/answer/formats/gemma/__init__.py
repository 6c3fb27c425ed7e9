"""The tool-call format of Gemma 4, and its reasoning tags."""

from saccade.text.answer.reasoning import Tags
from saccade.text.answer.tool_format import ToolFormat

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CHANNEL = Tags("<|channel>", "<channel|>", "thought", name="channel")

FORMAT = ToolFormat(
    "gemma",
    marks=(OPEN,),
    order=30,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE, QUOTE}),
    thoughts=CHANNEL,
    code=f"{__name__}.syntax:SYNTAX",
)
