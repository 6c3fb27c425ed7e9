"""The command `saccade chat`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App
from cyclopts.types import ExistingFile
from rich.console import Console

from saccade.arguments import flat
from saccade.core.errors import ConfigError
from saccade.core.options import ModelOptions

app = App(name="chat")


@app.default
def chat(
    question: str | None = None,
    /,
    *,
    image: tuple[ExistingFile, ...] = (),
    model: str = "demo",
    base_url: str | None = None,
    api_key: str | None = None,
    max_tokens: int = 256,
    model_options: Annotated[ModelOptions, flat(ModelOptions, "Model")] = ModelOptions(),  # noqa: B008
) -> None:
    """Ask a local model or a server one question about images, or chat with a server.

    Parameters
    ----------
    question:
        The question. Without it, a session starts, which requires --base-url. The session keeps the
        history, and /image PATH or URL adds an image. After each answer, it reports cache hits.
    image:
        An image file. Repeat the option for several images.
    model:
        The model to load. With --base-url, the server's name for the model.
    base_url:
        Ask this OpenAI-compatible server (for example http://127.0.0.1:8000, with or without /v1)
        instead of loading a model.
    api_key:
        The server's key.
    max_tokens:
        Maximum answer length in tokens.
    """
    if base_url is not None:
        from saccade.tools.chat import ask_server, converse, typed

        name = None if model == "demo" else model
        if question is None:
            converse(base_url, api_key, name, image, max_tokens, typed())
        else:
            ask_server(base_url, api_key, name, question, image, max_tokens)
        return
    if question is None:
        raise ConfigError("a session needs a server: set --base-url, or ask a question")
    from saccade.core.types import SamplingParams
    from saccade.llm import LLM, check_image

    sampling = SamplingParams(max_tokens=max_tokens)
    for path in image:  # fail before the model is loaded, which takes seconds
        check_image(path)
    with LLM(
        model, **{name: getattr(model_options, name) for name in ModelOptions.__slots__}
    ) as llm:
        answer = llm.chat([{"role": "user", "content": [*image, question]}], sampling)
    Console().print(answer.text, markup=False)
