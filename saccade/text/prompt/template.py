"""The tokenizer and chat template of a checkpoint, which convert a chat to tokens.

Rendering is equivalent to transformers' `apply_chat_template`, token for token. The template writes
one placeholder per image, which `FamilySpec.expand_prompt` expands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.family import Templates, put_spaces
from saccade.core.given_paths import read_text, reason, shown
from saccade.core.types import CHAT_NAMES, FieldNames
from saccade.text.prompt.content_shapes import ContentShapes, TemplateMessage, find_shapes

TIKTOKEN_FILE = "tiktoken.model"
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a template may raise for messages that it cannot render."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SOME_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
_PRIVATE = re.compile(r"\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""Matches JSON escapes of private-use characters, which `special_tokens.py` uses as
placeholders.
"""


class Tokenizer:
    """The tokenizer of a checkpoint.

    named_tokens: its special tokens by role (`eos_token`, ...), as templates use them.
    """

    def __init__(self, backend: Backend, named_tokens: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load `tokenizer.json` or a tiktoken file, and `tokenizer_config.json` if it exists.

        Raises CheckpointError that names the file.
        """
        path = directory / "tokenizer_config.json"
        config = _read_json(path)
        backend = _read_backend(directory, config)
        try:
            _add_late(backend, config.get("added_tokens_decoder") or {})
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: added_tokens_decoder: {error}") from None
        names = [name for name in _NAMED_TOKENS if config.get(name) is not None]
        return cls(backend, {name: _content(config[name], f"{path}: {name}") for name in names})

    @cached_property
    def json(self) -> str:
        """The tokenizer as JSON, for grammars. It takes 0.2 s to serialize a large vocabulary."""
        return self.backend.to_str()

    @cached_property
    def longest_token(self) -> int:
        """The number of characters in the longest token."""
        return max(map(len, self.backend.get_vocab()))

    def encode(self, text: str, special: bool = False, most: int | None = None) -> list[int]:
        """Return the token ids of `text`. Raises TooManyTokens if there are more than `most`.

        special: add the tokens that the tokenizer puts around a text. Chat templates write these
        themselves.

        The text is encoded as a batch, because the library releases the GIL only for batches.
        """
        encoding = self.backend.encode_batch_fast([text], add_special_tokens=special)[0]
        return listed(encoding, most)

    def ends(self, text: str, special: bool = False) -> list[int]:
        """Return the offset at which each token ends in the text, or 0 for tokens that are added
        around the text.
        """
        offsets = self.backend.encode_batch([text], add_special_tokens=special)[0].offsets
        return [end for _, end in offsets]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens. Unknown ids are skipped."""
        return self.backend.decode(list(tokens), skip_special_tokens=False)

    def string(self, token: int) -> str:
        """Return a token as it is in the vocabulary, or "" for an unknown id."""
        return self.backend.id_to_token(token) or ""


def listed(encoding: Encoding, most: int | None = None) -> list[int]:
    """Return the ids of an encoding. Raises TooManyTokens if there are more than `most`, before the
    list is built.
    """
    if most is not None and len(encoding) > most:
        raise TooManyTokens(len(encoding))
    return encoding.ids


class TooManyTokens(Exception):
    """A text has at least `count` tokens, which is more than allowed."""

    def __init__(self, count: int) -> None:
        super().__init__(f"at least {count} tokens")


class ChatTemplate:
    """The chat template of a checkpoint, or its named templates.

    "default" is required. "tool_use" is used for requests with tools. `names` are the variables
    that the templates use.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        origin: str = "chat template",
        shows_calls: bool = True,
        shown: tuple[str, str] | None = None,
        spaced: str = "",
    ) -> None:
        """Compile the templates. Raises CheckpointError if one does not compile.

        sources: Jinja source by name.
        variables: `Tokenizer.named_tokens`.
        origin: where the templates are from, for error messages.
        shows_calls: "default" renders tool calls and their results. Otherwise, messages with calls
            also use "tool_use".
        shown, spaced: as in `Templates`.
        """
        self._sources = dict(sources)
        self._variables = dict(variables)
        self._shows_calls = shows_calls
        self._shown = shown
        self._spaced = spaced
        environment = _environment()
        try:
            self.names = frozenset[str]().union(
                *(
                    jinja2.meta.find_undeclared_variables(environment.parse(source))
                    for source in sources.values()
                )
            )
            self._compiled = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}: line {error.lineno}: {error.message}") from None
        if "default" not in self._compiled:
            raise CheckpointError(
                f'{origin}: no template named "default"; there are: {", ".join(sorted(sources))}'
            )
        self._shapes = {
            (name, offered): self._find_shapes(name, offered)
            for name in self._compiled
            for offered in (False, True)
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """The Jinja source of all templates."""
        return tuple(self._sources.values())

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer: Tokenizer,
        override: Path | None,
        own: Templates,
    ) -> ChatTemplate:
        """Load the first of `override`, `chat_template.jinja`, `chat_template.json` and
        `tokenizer_config.json` that has a template. If there is none, use the default template in
        `own`, the family's templates.

        If the template does not support tools, but otherwise writes messages as the family does,
        the family's template for tools is added.
        """
        sources, origin = _find_sources(directory, override, own.default)
        reads: Any = {"shown": own.shown, "spaced": own.spaced}
        found = cls(sources, tokenizer.named_tokens, origin, **reads)
        written_so = all(mark in sources["default"] for mark in own.marks)
        if "tools" in found.names or own.tools is None or not written_so:
            return found
        sources = {**sources, "tool_use": _read_text(own.tools)}
        return cls(sources, tokenizer.named_tokens, origin, shows_calls=False, **reads)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        names: FieldNames = CHAT_NAMES,
        opening: str = "<",
    ) -> str:
        """Return the text of the prompt. Raises InvalidRequest, with the template's message if it
        rejects the messages.

        variables: `chat_template_kwargs` of the request.
        names: the client's names for fields, for error messages.
        opening: the characters that stand for <.
        continue_final_message: the text ends with the content of the last message, which the model
            continues.
        """
        own = dict(variables or {})
        if reserved := _RESERVED & own.keys():
            raise InvalidRequest(
                f"{sorted(reserved)[0]!r} cannot be set through chat_template_kwargs",
                "chat_template_kwargs",
            )
        name = self._name(messages, tools)
        messages = self._shapes[name, tools is not None].fit(messages)
        last, continued = "", names["continue_final_message"]
        if continue_final_message:
            messages, last = _mark_end(messages, continued)
        given = {**self._variables, **own}
        try:
            text = self._write(name, given, messages, tools, add_generation_prompt)
        except _REFUSALS as error:
            raise InvalidRequest(
                f"the model's chat template rejects these messages: {error}", names["messages"]
            ) from error
        if continue_final_message:
            text = _cut_at_mark(text, last, continued)
        if self._shown is not None:
            text = text.replace(*self._shown)
        return put_spaces(text, self._spaced, opening) if self._spaced else text

    def hidden(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[int, int] | None:
        """Return (message, part) of the first image or video that the template would leave out, or
        None.

        Templates leave out media of roles whose content they join as strings.
        """
        return self._shapes[self._name(messages, tools), tools is not None].hidden(messages)

    def _name(
        self, messages: Sequence[TemplateMessage], tools: Sequence[dict[str, Any]] | None
    ) -> str:
        # Checkpoints with several templates have a separate one for tools.
        calls = tools is not None or (not self._shows_calls and _has_calls(messages))
        return "tool_use" if calls and "tool_use" in self._compiled else "default"

    def _write(
        self,
        name: str,
        variables: Mapping[str, Any],
        messages: Sequence[TemplateMessage],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        return self._compiled[name].render(
            **variables,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    def _find_shapes(self, name: str, offered: bool) -> ContentShapes:
        """Detect the shapes of content that a template supports. offered: whether the test prompts
        have tools.
        """
        tools = [_SOME_TOOL] if offered else None

        def render(messages: Sequence[TemplateMessage]) -> str | None:
            try:
                return self._write(name, self._variables, messages, tools, True)
            except _REFUSALS:
                return None

        return find_shapes(render)


def _find_sources(
    directory: Path, override: Path | None, default: Path | None
) -> tuple[dict[str, str], str]:
    """Return the templates by name, and where they are from. Raises CheckpointError.

    default: used if the checkpoint has none.
    """
    if override is not None:
        if not override.is_file():
            raise CheckpointError(
                f"--chat-template {override}: there is no such file; omit the option to use the "
                "checkpoint's own template"
            )
        return {"default": _read_text(override)}, str(override)
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        extra = {
            path.stem: _read_text(path)
            for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        }
        return {**extra, "default": _read_text(jinja)}, str(jinja)
    for path in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        found = _read_json(path).get("chat_template")
        if isinstance(found, str):
            return {"default": found}, str(path)
        if found is not None:
            return _by_name(found, path), str(path)
    if default is not None:
        return {"default": _read_text(default)}, str(default)
    raise CheckpointError(
        f"{directory}: no chat template in chat_template.jinja, chat_template.json or "
        "tokenizer_config.json; set one with --chat-template FILE"
    )


def _by_name(found: object, path: Path) -> dict[str, str]:
    templates = {
        each["name"]: each["template"]
        for each in (found if isinstance(found, list) else ())
        if isinstance(each, dict) and {"name", "template"} <= each.keys()
    }
    if "default" not in templates or not all(isinstance(x, str) for x in templates.values()):
        raise CheckpointError(
            f'{path}: chat_template must be a string, or a list of {{"name", "template"}} objects, '
            'one of them named "default"'
        )
    return templates


def _has_calls(messages: Sequence[TemplateMessage]) -> bool:
    return any(each.get("tool_calls") or each["role"] == "tool" for each in messages)


class _Generation(jinja2.ext.Extension):
    """Supports `{% generation %}`, which marks responses for training. Only the body of the block
    is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    # Jinja's own tojson filter escapes HTML and sorts keys.
    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return _PRIVATE.sub(lambda pair: json.loads(f'"{pair[0]}"'), text) if ensure_ascii else text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _mark_end(messages: Sequence[TemplateMessage], param: str) -> tuple[list[TemplateMessage], str]:
    """Return the messages with a mark after the last text of the last message, and that text.

    Raises InvalidRequest that names `param` unless the last message ends with text.
    """
    final = dict(messages[-1])
    content = final.get("content")
    if isinstance(content, str):
        last = content
        final["content"] = content + _CONTINUE_HERE
    elif content and content[-1].get("type") == "text":
        last = content[-1]["text"]
        final["content"] = [*content[:-1], {**content[-1], "text": last + _CONTINUE_HERE}]
    else:
        raise InvalidRequest(
            f"{param}: the last message must end in text, because it is to be continued", param
        )
    return [*messages[:-1], final], last


def _cut_at_mark(text: str, last: str, param: str) -> str:
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0 or last.strip() not in text:
        raise InvalidRequest(
            "the model's chat template does not render the last message, so it cannot be continued",
            param,
        )
    # A template that trims content has also trimmed the mark's trailing space. The text before the
    # mark must then be trimmed as well.
    return text[:at] if text.startswith(_CONTINUE_HERE, at) else text[:at].rstrip()


def _read_backend(directory: Path, config: Mapping[str, Any]) -> Backend:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: {error}") from None
    if (ranks := directory / TIKTOKEN_FILE).is_file():
        from saccade.text.prompt.tiktoken_file import read_tiktoken

        return read_tiktoken(ranks, config)
    raise CheckpointError(
        f"{path}: no such file; Saccade needs the fast tokenizer's tokenizer.json "
        f"(or {TIKTOKEN_FILE})"
    )


def _add_late(backend: Backend, tokens: Mapping[str, Any]) -> None:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks, ordered by id."""
    known = backend.get_added_tokens_decoder()
    late = sorted((int(i), token) for i, token in tokens.items() if int(i) not in known)
    for _, token in late:
        backend.add_tokens([AddedToken(**token)])


def _content(token: object, where: str) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(
            f"{where} must be a string, or an object with a string as its content"
        )
    return content


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(path)}: {reason(error)}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return found
