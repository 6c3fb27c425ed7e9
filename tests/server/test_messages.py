"""POST /v1/messages and its count of tokens: the unchanged anthropic SDK against a server."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from PIL import Image

from saccade.core.messages import Submit
from saccade.core.options import ServerOptions
from tests.server.conftest import TOKENIZER, Served, serving
from tests.server.echo import CACHED, CONTEXT

HI: Any = [{"role": "user", "content": "Hi"}]
MOST: Any = {"model": "demo", "max_tokens": 50}


def png(color: str = "red", side: int = 64) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), color).save(out, "PNG")
    return out.getvalue()


def shown(data: bytes, **more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source, **more}


def says(served: Served, text: str) -> None:
    served.engine.reply = lambda request: TOKENIZER.encode(text)


@pytest.fixture
def claude(served: Served) -> Iterator[Any]:
    """The SDK; tests send plain dicts, which its TypedDicts would refuse."""
    with anthropic.Anthropic(
        api_key="any", base_url=served.address, max_retries=0, timeout=30
    ) as client:
        yield client


def submitted(served: Served) -> list[Any]:
    return [each.request for each in served.engine.received if isinstance(each, Submit)]


def test_a_message_is_answered(claude: Any, served: Served) -> None:
    message = claude.messages.create(**MOST, messages=HI, system="Be kind.")
    (request,) = submitted(served)
    assert message.content[0].to_dict() == {"type": "text", "text": "Hello!"}
    assert (message.role, message.model, message.type) == ("assistant", "demo", "message")
    assert message.id.startswith("msg_") and message._request_id
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens == len(request.tokens) - CACHED
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (CACHED, 0)
    assert usage.output_tokens == len(TOKENIZER.encode("Hello!")) + 1


def test_a_stream_says_what_the_whole_says(claude: Any, served: Served) -> None:
    says(served, "Hello, 世界!")
    whole = claude.messages.create(**MOST, messages=HI)
    with claude.messages.stream(**MOST, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello, 世界!"
    skip = {"id"}
    told = final.model_dump(exclude={"content": {"__all__": {"parsed_output"}}, "id": True})
    assert told == whole.model_dump(exclude=skip)


def test_the_raw_events_come_in_order(claude: Any) -> None:
    kinds = [event.type for event in claude.messages.create(**MOST, messages=HI, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the SDK leaves pings out
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
