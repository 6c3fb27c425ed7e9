"""GET /docs: `/openapi.json` as a page to be read.

Owns the page: one file without scripts, fetched from nowhere. Knows nothing of routes or of fields
but what the document says of them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from saccade.api.about.docs_examples import as_curl, as_python
from saccade.api.about.openapi import describe

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 56rem; padding: 0 1rem;
  color: #1c1e21; background: #fff }
h2 { font-size: 1rem; margin: 1.6rem 0 .2rem; border-top: 1px solid #ddd; padding-top: .8rem }
code { font: 13px ui-monospace, monospace }
.method { display: inline-block; min-width: 4.2rem; font-weight: 700; color: #0a5 }
.type { color: #666 } .must { color: #b00; font-size: .8rem }
dl { margin: .3rem 0 .3rem 1rem } dt { float: left; clear: left; margin-right: .6rem }
dd { margin: 0 0 .2rem } details { margin-left: 1rem } summary { cursor: pointer }
pre { background: #f4f5f7; border-radius: 6px; padding: .6rem .8rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16rem }
.says { margin: .2rem 0 .2rem; white-space: pre-line; color: #444 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #16181c } h2 { border-color:
  #333 } pre { background: #23262b } .says, .type { color: #aaa } }
"""
POLICY = (
    "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)
"""Content-Security-Policy: nothing but this page's own style."""

_PREFIX = "#/components/schemas/"


_FIRST = f"""<p>A server for models that read text, images, PDFs and videos. It speaks the APIs of
OpenAI and Anthropic, and it keeps the work on an image: sent again, an image costs a hash. For
example:</p><pre><code>{escape(as_curl("post", "/v1/chat/completions"))}</code></pre>
<p>Generators of clients read the same in <a href="openapi.json">openapi.json</a>.</p>"""


@cache
def page() -> str:
    """Render the page as HTML."""
    document = describe()
    info, schemas = document["info"], document["components"]["schemas"]
    routes = [
        _route(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    named = [
        f'<section id="{escape(name)}"><h2><code>{escape(name)}</code></h2>{_object(schema)}'
        "</section>"
        for name, schema in sorted(schemas.items())
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"{_FIRST}{''.join(routes)}<h1>Bodies</h1>{''.join(named)}</body></html>"
    )


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    takes = [_type(media["schema"]) for media in body.values()]
    gives = operation["responses"]["200"].get("content", {})
    told = [_answer(kind, media) for kind, media in gives.items() if media]
    lines = [escape(operation.get("summary", ""))]
    if takes:
        lines.append(f"takes {', '.join(takes)}")
    if told:
        lines.append(f"answers {' or '.join(told)}")
    said = "; ".join(line for line in lines if line)
    calls = "".join(
        f"<p class=says>{name}</p><pre><code>{escape(call)}</code></pre>"
        for name, call in (("curl", as_curl(method, path)), ("Python", as_python(method, path)))
    )
    return (
        f'<h2><span class="method">{method.upper()}</span> <code>{escape(path)}</code></h2>'
        f"<p>{said}</p><details><summary>Example call</summary>{calls}</details>"
    )


def _answer(kind: str, media: dict[str, Any]) -> str:
    return "a stream of events" if kind == "text/event-stream" else _type(media["schema"])


def _object(schema: dict[str, Any]) -> str:
    says = escape(" ".join(str(schema.get("description", "")).split()))
    head = f'<p class="says">{says}</p>' if says else ""
    if options := schema.get("anyOf"):
        return head + "".join(_object(each) for each in options)
    must = set(schema.get("required", ()))
    fields = "".join(
        f"<dt><code>{escape(name)}</code></dt><dd>{_type(field)}"
        f"{_told(field)}"
        f"{' <span class=must>required</span>' if name in must else ''}</dd>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"{head}<dl>{fields}</dl>" if fields else head


def _told(field: dict[str, Any]) -> str:
    says = field.get("description")
    return f' <span class="says">{escape(says)}</span>' if says else ""


def _type(schema: dict[str, Any]) -> str:
    """Describe a schema in a line."""
    return f'<span class="type">{" or ".join(_types(schema))}</span>'


def _types(schema: dict[str, Any]) -> Iterator[str]:
    if reference := schema.get("$ref"):
        name = escape(reference.removeprefix(_PREFIX))
        yield f'<a href="#{name}">{name}</a>'
    elif options := schema.get("anyOf"):
        for option in options:
            yield from _types(option)
    elif "enum" in schema:
        yield ", ".join(escape(repr(each)) for each in schema["enum"])
    elif schema.get("type") == "array":
        yield f"list of {' or '.join(_types(schema.get('items', {})))}"
    elif schema.get("type") != "null":
        bounds = [schema[key] for key in ("minimum", "maximum") if key in schema]
        within = f" {' to '.join(map(str, bounds))}" if bounds else ""
        yield escape(str(schema.get("type", "anything")) + within)
