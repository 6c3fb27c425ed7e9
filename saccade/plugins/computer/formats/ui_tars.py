"""UI-TARS: thoughts, then an action, as text.

    Thought: The menu is open.
    Action: click(start_box='(512,300)')

In UI-TARS 1.5, a Qwen2.5-VL, coordinates are pixels of the resized image. In older versions, based
on Qwen2-VL, they are thousandths. Saccade adds `screenshot`, for clients that send one only on
request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from saccade.plugins.computer.action_format import ActionFormat, WrittenActions
from saccade.plugins.computer.vocabulary import ActionWords, Word
from saccade.plugins.computer.word_fields import Chord, Texts, Wheel, WrittenPoint
from saccade.text.answer.tool_format import CallSyntax, ToolFormat
from saccade.text.grammar.call_grammar import Lexicon, Need, ValueParts, begun_rule, text_without
from saccade.text.grammar.parts import quoted
from saccade.text.grammar.tools import Tool

OPEN = "Action:"
_AT = WrittenPoint("start_box")
WORDS: Mapping[str, Word] = {
    "click": Word("click", (_AT,)),
    "left_double": Word("click", (_AT,), {"count": 2}),
    "right_single": Word("click", (_AT,), {"button": "right"}),
    "drag": Word("drag", (_AT, WrittenPoint("end_box"))),
    "hotkey": Word("key", (Chord("key", "pyautogui", " "),)),
    "type": Word("type", (Texts("content", "text"),)),
    "scroll": Word("scroll", (_AT, Wheel("direction", notches=5))),
    "wait": Word("wait", (), {"seconds": 5}, frozenset({"seconds"})),
    "screenshot": Word("screenshot"),
    "finished": Word("answer", (Texts("content", "text"),)),
    "call_user": Word("answer", (), {"text": "I need your help."}),
}
_ESCAPES = (
    "Use escape characters \\', \\\", and \\n in content part to ensure we can parse the content "
    "in normal python string format."
)
_LINES = {
    "click": "click(start_box='(x1,y1)')",
    "left_double": "left_double(start_box='(x1,y1)')",
    "right_single": "right_single(start_box='(x1,y1)')",
    "drag": "drag(start_box='(x1,y1)', end_box='(x2,y2)')",
    "hotkey": "hotkey(key='ctrl c') # Split keys with a space and use lowercase. Also, do not use "
    "more than 3 keys in one hotkey action.",
    "type": f"type(content='xxx') # {_ESCAPES} If you want to submit your input, use \\n at the "
    "end of content.",
    "scroll": "scroll(start_box='(x1,y1)', direction='down or up or right or left')",
    "wait": "wait() #Sleep for 5s and take a screenshot to check for any changes.",
    "screenshot": "screenshot() # Take a screenshot.",
    "finished": f"finished(content='xxx') # {_ESCAPES}",
    "call_user": "call_user() # Submit the task and call the user when the task is unsolvable, or "
    "when you need the user's help.",
}
_PROMPT = """You are a GUI agent. You are given a task and your action history, with screenshots. \
You need to perform the next action to complete the task.

## Output Format
```
Thought: ...
Action: ...
```

## Action Space

{lines}

## Note
- Use English in `Thought` part.
- Write a small plan and finally summarize your next action (with its target element) in one \
sentence in `Thought` part.

## User Instruction
"""
_ESCAPED = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
_CONTROL = re.compile(r"[\\'\n\r\t]")
_LONGEST = 64
"""Maximum characters of a name or a key."""


class WrittenCall:
    """One call: NAME(KEY='TEXT', ...)."""

    def __init__(self) -> None:
        """Start after the opening tag."""
        self.name: str | None = None
        self.done = False
        self._phase = "name"  # name, key, value, text, escape, next
        self._word = ""
        self._key = ""
        self._arguments: dict[str, str] = {}
        self._taken = False

    @property
    def certain(self) -> bool:
        return self.done

    def take_arguments(self) -> str:
        if self._taken or not self.done:
            return ""
        self._taken = True
        return json.dumps(self._arguments, ensure_ascii=False)

    def skip(self, data: str, at: int) -> int:  # noqa: ARG002
        return at

    def feed(self, character: str) -> bool:
        """Parse one character. Return False, without consuming it, if the text is not a call."""
        match self._phase:
            case "text":
                if character == "'":
                    self._arguments[self._key] = self._word
                    self._phase = "next"
                elif character == "\\":
                    self._phase = "escape"
                else:
                    self._word += character
                return True
            case "escape":
                self._word += _PLAIN.get(character, character)
                self._phase = "text"
                return True
            case "next":
                if character == ",":
                    self._phase, self._word = "key", ""
                return character in ", " or self._end(character)
            case "value":
                self._phase, self._word = "text", ""
                return character == "'"
        return self._feed_word(character)

    def _feed_word(self, character: str) -> bool:
        """Parse a character of a name up to its parenthesis, or of a key up to its equals sign."""
        if character.isspace():
            return not self._word
        if character == ("(" if self._phase == "name" else "=") and self._word:
            if self._phase == "name":
                self.name, self._word, self._phase = self._word, "", "key"
            else:
                self._key, self._phase = self._word, "value"
            return True
        if character == ")" and self._phase == "key" and not (self._word or self._arguments):
            return self._end(character)
        self._word += character
        return (character.isalnum() or character == "_") and len(self._word) <= _LONGEST

    def _end(self, character: str) -> bool:
        self.done = character == ")"
        return self.done


class WrittenGrammar:
    """The grammar for a thought followed by one action."""

    def __init__(self, lexicon: Lexicon) -> None:
        """Ignore the lexicon, because no tags are tokens."""

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:  # noqa: ARG002
        terms, before = list[str](), f"{tool.name}("
        for key, each in schema["properties"].items():
            terms += [quoted(f"{before}{key}='"), _value(each)]
            before = "', "
        end = quoted("')" if terms else f"{before})")
        return [" ".join([f"tool_{index}:", *terms, end])]

    def answer_rules(self, need: Need, parallel: bool, answer: bool) -> list[str]:  # noqa: ARG002
        if need == "may":
            begun = begun_rule(OPEN, quoted(OPEN), " ")
            return ["start: (begun called)? AFTER", text_without(OPEN), begun]
        return [f"start: THOUGHT? {quoted(f'{OPEN} ')} called", r"THOUGHT: /Thought: [^\n]*\n/"]


def _value(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"({' | '.join(quoted(each) for each in schema['enum'])})"
    pattern = schema.get("pattern", r"^([^'\\\n]|\\.)*$")
    escaped = pattern[1:-1].replace("/", "\\/")  # drop the anchors: a term matches the whole text
    return f"/{escaped}/"


def _instruct(words: Mapping[str, Word]) -> str:
    return _PROMPT.format(lines="\n".join(_LINES[name] for name in words))


def _write(name: str, arguments: Mapping[str, Any]) -> str:
    said = ", ".join(f"{key}='{_escaped(value)}'" for key, value in arguments.items())
    return f"{name}({said})"


def _escaped(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return _CONTROL.sub(lambda found: _ESCAPED[found[0]], text)


CALLS = ToolFormat(
    "ui_tars",
    marks=(),
    order=0,
    opens=OPEN,
    tags=frozenset(),
    code=f"{__name__}:SYNTAX",
)
SYNTAX = CallSyntax(reader=lambda _: WrittenCall(), grammar=WrittenGrammar)
FORMAT = ActionFormat(
    "ui_tars",
    serves=lambda _, model: bool(re.search(r"ui[-_]?tars", model, re.IGNORECASE)),
    order=10,
    vocabulary=ActionWords(WORDS),
    in_pixels=lambda family: family.startswith("qwen2_5_vl"),
    written=WrittenActions(CALLS, _instruct, _write, OPEN),
    note="as UI-TARS publishes it",
)
