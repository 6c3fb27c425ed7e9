r"""A server to compare with: OpenAI's chat completions API for OpenVINO GenAI's continuous
batching, with its prefix cache.

    python -m venv OV     # separate, because the export needs transformers 4
    OV/bin/pip install openvino-genai==2026.4.1 optimum-intel==2.2.0 transformers==4.57.6 \
        nncf==3.4.0 torch torchvision pillow starlette uvicorn
    OV/bin/optimum-cli export openvino -m MODEL_FOLDER --task image-text-to-text \
        --weight-format int8 EXPORT     # or fp16
    python -m saccade_bench.peers.run MODEL_FOLDER --saccade "int8=--quantization int8" \
        --beside "openvino=env PYTHONPATH=bench OV/bin/python -m \
        saccade_bench.peers.openvino_server EXPORT --port {port} --threads {threads} \
        --served-model-name {name}"

For the export, MODEL_FOLDER must be in the format of transformers 4: no list
`extra_special_tokens` in tokenizer_config.json, and `rope_scaling` and `rope_theta` in config.json
instead of `rope_parameters`. An answer's text can be empty if a random checkpoint samples special
or unused tokens, which the library's detokenizer skips. Requests are batched as in OpenVINO's own
server: one thread runs the steps, and each new request's images are processed in another thread.
Usage counts the text of a prompt, and each image as one token, because the pipeline does not report
more. The server only accepts request fields that it supports.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

try:
    import openvino
    import openvino_genai
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"{missing}: run this in an environment with openvino-genai, as the module's docstring says"
    ) from None

Json = dict[str, Any]
SUPPORTED = {
    "stream",
    "stream_options",
    "model",
    "messages",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "ignore_eos",
    "seed",
}

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Piece:
    """The new text of one token, and the token counts so far. `finish` is set in the last piece."""

    text: str
    prompt: int
    count: int
    finish: str | None = None


def pictures(messages: list[Json]) -> Iterator[bytes]:
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                url = part["image_url"]["url"]
                if not url.startswith("data:"):
                    raise ValueError("images must be data URLs")
                yield base64.b64decode(url.partition(",")[2])


def tensor(encoded: bytes) -> openvino.Tensor:
    """Decode an image to uint8 [1, H, W, 3]."""
    with Image.open(io.BytesIO(encoded)) as image:
        return openvino.Tensor(np.asarray(image.convert("RGB"))[None].copy())


def tagged(messages: list[Json]) -> list[Json]:
    """Return messages with text content only, in which the library's tags replace images."""
    numbers = itertools.count()

    def text(content: str | list[Json]) -> str:
        if isinstance(content, str):
            return content
        return "".join(
            part["text"] if part["type"] == "text" else f"<ov_genai_image_{next(numbers)}>"
            for part in content
        )

    return [{"role": message["role"], "content": text(message["content"])} for message in messages]


@dataclass(frozen=True)
class Waiting:
    """A request in the pipeline. `news` receives its tokens, and then None or an error."""

    handle: openvino_genai.py_openvino_genai.GenerationHandle
    news: asyncio.Queue[list[int] | Exception | None]
    loop: asyncio.AbstractEventLoop

    def tell(self, item: list[int] | Exception | None) -> None:
        self.loop.call_soon_threadsafe(self.news.put_nowait, item)


class Steps:
    """The thread that steps the pipeline while requests are in flight."""

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, waiting: Waiting) -> None:
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
            try:
                self._pipeline.step()
                for waiting in tuple(self._waiting):
                    self._read(waiting)
            except Exception as error:  # forward any exception of the library to the clients
                with self._changed:
                    for waiting in self._waiting:
                        waiting.tell(error)
                    self._waiting.clear()

    def _read(self, waiting: Waiting) -> None:
        running = openvino_genai.GenerationStatus.RUNNING
        while waiting.handle.can_read():
            for output in waiting.handle.read().values():
                waiting.tell(list(output.generated_ids))
        if waiting.handle.get_status() != running:
            waiting.tell(None)
            with self._changed:
                self._waiting.remove(waiting)


class OpenVino:
    """An exported model and its tokenizer."""

    def __init__(self, folder: Path, name: str, properties: dict[str, str | int], gib: int) -> None:
        self.name = name
        settings = openvino_genai.SchedulerConfig()
        settings.enable_prefix_caching, settings.cache_size = True, gib
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, settings, "CPU", properties, {}, properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._steps = Steps(self._pipeline)
        self._numbers = itertools.count()

    def _begin(self, prompt: str, images: list[bytes], body: Json) -> object:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = limit(body)
        config.apply_chat_template = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = (body.get("temperature") or 0.0) > 0
        if config.do_sample:
            config.temperature, config.rng_seed = body["temperature"], body.get("seed") or 0
        if not config.ignore_eos:
            config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        tensors = [tensor(encoded) for encoded in images]
        return self._pipeline.add_request(next(self._numbers), prompt, tensors, config)

    async def answer(self, body: Json) -> AsyncIterator[Piece]:
        """Yield a piece for each token, and a last one. Raises the library's exceptions."""
        prompt = self._tokenizer.apply_chat_template(tagged(body["messages"]), True)
        counted = int(self._tokenizer.encode(prompt).input_ids.shape[1])
        images = list(pictures(body["messages"]))
        handle = await asyncio.to_thread(self._begin, prompt, images, body)
        waiting = Waiting(handle, asyncio.Queue(), asyncio.get_running_loop())
        self._steps.add(waiting)
        ids: list[int] = []
        said = ""
        try:
            while (item := await waiting.news.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                for token in item:
                    ids.append(token)
                    text = str(self._tokenizer.decode(ids))
                    new, said = ("", said) if text.endswith("\ufffd") else (text[len(said) :], text)
                    yield Piece(new, counted, len(ids))
            finish = "length" if len(ids) >= limit(body) else "stop"
            yield Piece("", counted, len(ids), finish)
        finally:
            waiting.handle.stop()


def limit(body: Json) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)


# ---- HTTP and response formats


def usage(piece: Piece) -> Json:
    return {
        "prompt_tokens": piece.prompt,
        "completion_tokens": piece.count,
        "total_tokens": piece.prompt + piece.count,
    }


def chunk(peer: OpenVino, delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    data = {
        "id": "peer",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": peer.name,
        "choices": [choice],
    }
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def stream(peer: OpenVino, body: Json) -> AsyncIterator[bytes]:
    yield chunk(peer, {"role": "assistant", "content": ""})
    last = Piece("", 0, 0)
    try:
        async for last in peer.answer(body):
            yield chunk(peer, {"content": last.text} if last.text else {}, last.finish)
    except Exception as error:
        yield (
            b"data: "
            + json.dumps(
                {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}}
            ).encode()
            + b"\n\n"
        )
        return
    if (body.get("stream_options") or {}).get("include_usage"):
        yield (
            b"data: "
            + json.dumps(
                {
                    "id": "peer",
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": usage(last),
                }
            ).encode()
            + b"\n\n"
        )
    yield b"data: [DONE]\n\n"


def app(peer: OpenVino) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        unknown = sorted(set(body) - SUPPORTED)
        if unknown:
            return JSONResponse(
                {
                    "error": {
                        "message": f"not supported: {', '.join(unknown)}",
                        "type": "invalid_request_error",
                    }
                },
                400,
            )
        if body.get("stream"):
            return StreamingResponse(stream(peer, body), media_type="text/event-stream")
        text, last = "", Piece("", 0, 0)
        try:
            async for last in peer.answer(body):
                text += last.text
        except Exception as error:
            return JSONResponse(
                {"error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}},
                500,
            )
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": last.finish,
        }
        return JSONResponse(
            {
                "id": "peer",
                "object": "chat.completion",
                "model": peer.name,
                "choices": [choice],
                "usage": usage(last),
            }
        )

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": peer.name, "object": "model"}]})

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--dtype", default="bfloat16", choices=list(PRECISIONS))
    parser.add_argument("--kv-cache-precision", default="u8", choices=["u8", "bf16", "f16", "f32"])
    parser.add_argument("--cache-size", type=int, default=2, help="GiB of KV")
    parser.add_argument("--threads", type=int, default=0, help="0: the library's own choice")
    parser.add_argument("--served-model-name", help="default: the folder's name")
    args = parser.parse_args()
    properties: dict[str, str | int] = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype],
        "KV_CACHE_PRECISION": args.kv_cache_precision,
    }
    if args.threads:
        properties["INFERENCE_NUM_THREADS"] = args.threads
    if not (args.folder / "openvino_language_model.xml").is_file():
        parser.error(f"{args.folder} is no export: it has no openvino_language_model.xml")
    name = args.served_model_name or args.folder.resolve().name
    peer = OpenVino(args.folder, name, properties, args.cache_size)
    uvicorn.run(app(peer), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
