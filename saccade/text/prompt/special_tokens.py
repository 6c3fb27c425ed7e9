"""Prevents clients from writing special tokens. Only the chat template can.

The name of a special token in a message is tokenized as plain text. To distinguish it from one that
the template wrote, a key character is chosen for each special token (`|` for Qwen's `<|im_end|>`).
While the template is rendered, a random private-use character replaces each key character in the
client's texts. These texts then cannot form a special token, however the template splits and joins
them. All special tokens in this marked rendering are therefore the template's, and have the same
offsets in the prompt. If messages contain no names of special tokens, the prompt is tokenized as
usual.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from saccade.core.errors import InvalidRequest
from saccade.core.types import CHAT_NAMES, FieldNames
from saccade.text.prompt.content_shapes import TemplateMessage
from saccade.text.prompt.template import ChatTemplate, Tokenizer, TooManyTokens, listed

_KEY_PREFERENCE = "|\uff5c[]<>"
_FIRST_PRIVATE, _NUM_PRIVATE = 0x100000, 0xFFFE  # plane 16, for private use
_DRAWS = 16


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt, and a copy of the same length in which the key characters of the client's
    texts are replaced.
    """

    text: str
    marked: str


class Literals:
    """Renders and tokenizes chats so that only the template can write special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._plain = Backend.from_str(tokenizer.backend.to_str())
        self._plain.encode_special_tokens = True
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        # The tokenizer searches for them in this order: the leftmost, then the longest. Adjacent
        # white space may belong to the token.
        names = sorted(added.values(), key=lambda token: -len(token.content))
        self._pattern = re.compile(
            "|".join(
                (r"\s*" if token.lstrip else "")
                + f"(?:{re.escape(token.content)})"
                + (r"\s*" if token.rstrip else "")
                for token in names
            )
            or r"(?!)"
        )
        self._keys = _key_characters(list(self._special))

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        names: FieldNames = CHAT_NAMES,
    ) -> Rendered:
        """Render as `ChatTemplate.render` does. All text in the arguments counts as the
        client's.
        """
        written = {"messages": messages, "tools": tools, "variables": variables or {}}
        try:
            pairs = self._choose_placeholders(written, names["messages"])
            given = _replace(written, pairs)
        except RecursionError:
            raise InvalidRequest(
                f"{names['messages']} is nested too deeply: make it flatter", names["messages"]
            ) from None
        back = [(stand_in, key) for key, stand_in in pairs]
        try:
            marked = template.render(
                given["messages"],
                given["tools"],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=given["variables"],
                names=names,
                opening="".join(["<", *(stand_in for key, stand_in in pairs if key == "<")]),
            )
        except InvalidRequest as error:
            raise InvalidRequest(_replace(error.message, back), error.param, error.code) from error
        return Rendered(_replace(marked, back), marked)

    def encode(
        self, rendered: Rendered, special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of a rendered prompt. Raises TooManyTokens.

        special, most: as in `Tokenizer.encode`.
        """
        text, marked = rendered.text, rendered.marked
        if marked == text or self._specials(text) == (written := self._specials(marked)):
            return self._tokenizer.encode(text, special, most)
        tokens, at = [], 0
        for start, end, token in written:
            tokens += self._encode_plain(text[at:start], most)
            tokens.append(token)
            at = end
            if most is not None and len(tokens) > most:
                raise TooManyTokens(len(tokens))
        tokens += self._encode_plain(text[at:], most)
        before, after = self._around() if special else ([], [])
        return [*before, *tokens, *after]

    def ends(self, rendered: Rendered, special: bool = False) -> list[int]:
        """Return the offset at which each token ends in the text, or 0 for tokens that are added
        around the text.
        """
        text, marked = rendered.text, rendered.marked
        if marked == text or self._specials(text) == (written := self._specials(marked)):
            return self._tokenizer.ends(text, special)
        ends, at = [], 0
        for start, end, _ in [*written, (len(text), len(text), None)]:
            plain = self._plain.encode_batch([text[at:start]], add_special_tokens=False)[0]
            ends += [at + offset for _, offset in plain.offsets]
            ends.append(end)
            at = end
        before, after = self._around() if special else ([], [])
        return [0] * len(before) + ends[:-1] + [0] * len(after)

    def _around(self) -> tuple[list[int], list[int]]:
        bare, whole = self._tokenizer.encode("x"), self._tokenizer.encode("x", special=True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def _encode_plain(self, text: str, most: int | None) -> list[int]:
        return listed(self._plain.encode_batch_fast([text], add_special_tokens=False)[0], most)

    def _specials(self, text: str) -> list[tuple[int, int, int]]:
        """Return (start, end, id) of the special tokens that the tokenizer finds in `text`."""
        return [
            (match.start(), match.end(), token)
            for match in self._pattern.finditer(text)
            if (token := self._special.get(match.group().strip(), self._special.get(match.group())))
            is not None
        ]

    def _choose_placeholders(self, written: object, param: str) -> list[tuple[str, str]]:
        """Choose a random placeholder, which does not occur in the texts, for each key character.

        Raises InvalidRequest that names `param` if the texts contain too many private-use
        characters.
        """
        for _ in range(_DRAWS):
            drawn = set[str]()
            while len(drawn) < len(self._keys):
                drawn.add(chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)))
            if not any(_holds(written, stand_in) for stand_in in drawn):
                return list(zip(self._keys, drawn))
        raise InvalidRequest(
            f"{param}: the texts use too many characters of the last private plane, U+100000 and "
            "up",
            param,
        )


def _key_characters(names: Sequence[str]) -> list[str]:
    """Choose few characters, such that each name contains at least one of them.

    Characters that are rare in the logic of templates are preferred.
    """
    keys: list[str] = []
    for name in names:
        if not any(key in name for key in keys):
            marks = [mark for mark in _KEY_PREFERENCE if mark in name]
            marks += [mark for mark in name if not mark.isalnum() and not mark.isspace()]
            keys.append((marks or list(name))[0])
    return keys


def _replace(value: Any, pairs: Sequence[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        for old, new in pairs:
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {_replace(key, pairs): _replace(each, pairs) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(each, pairs) for each in value]
    return value


def _holds(value: object, character: str) -> bool:
    if isinstance(value, str):
        return character in value
    if isinstance(value, Mapping):
        return any(_holds(key, character) or _holds(each, character) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(_holds(each, character) for each in value)
    return False
