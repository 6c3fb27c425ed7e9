"""The commands: `saccade serve`, `route`, `proxy`, `deploy`, `chat`, `ocr`, `demo`, `version`, and
those joined by other distributions' entry points (`tools/brought.py`).

Options come from the dataclasses in `core/options.py`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter
from cyclopts.config import Env, Toml
from cyclopts.help import DefaultFormatter, HelpPanel
from cyclopts.types import ExistingFile
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape

from saccade import __version__
from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.given_paths import reason, sendable, shown
from saccade.core.options import (
    AnswerOptions,
    CacheOptions,
    ConnectionOptions,
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ObservabilityOptions,
    ParallelOptions,
    ResponseOptions,
    RoleOptions,
    ServeOptions,
    ServerOptions,
)
from saccade.core.route_options import DeployOptions, ProxyOptions, RouteOptions, SpreadOptions
from saccade.core.tuning import GONE, Tuning, basic_options, tuning_values
from saccade.ipc.memory import begin_imports, end_imports
from saccade.tools.brought import join

HELP = ("--help", "--help-advanced", "-h")


def explain(error: CycloptsError) -> RenderableType:
    """Return the message for an unreadable command line. A misspelt --help comes first."""
    for token in {*sys.argv[1:]}.difference(HELP):
        if token.startswith("-") and (meant := get_close_matches(token, HELP, n=1, cutoff=0.75)):
            return CycloptsPanel(f"Unknown option: {token}. Did you mean {meant[0]}?")
    return CycloptsPanel(error)


app = App(
    name="saccade",
    help="Serve vision-language models through an OpenAI-compatible API. An image costs its "
    "work once. After that it costs a hash.",
    version=__version__,
    default_parameter=Parameter(negative=""),
    help_flags=HELP,
    error_formatter=explain,
)
deploy = App(name="deploy", help="Write what a cluster needs to run Saccade.")
app.command(deploy)
join(app)

ADVANCED = "--help-advanced" in sys.argv
"""True if the help is to show every option."""

SERVE_OPTIONS = (
    ModelOptions,
    EngineOptions,
    CacheOptions,
    ParallelOptions,
    MediaOptions,
    ServerOptions,
    ConnectionOptions,
    ResponseOptions,
    ObservabilityOptions,
    RoleOptions,
    AnswerOptions,
)
BASIC = basic_options(SERVE_OPTIONS)
TUNING = tuning_values(SERVE_OPTIONS)

_FETCHES = "`saccade serve MODEL` downloads a model from the hub if it is not on this machine."
_LISTS = (
    "`GET /v1/models` lists what a running server serves. Models are folders, GGUF files, and hub "
    "ids, which the hub's own cache keeps."
)
_STATE = "One server serves one model. `GET /health` and the web UI show its state."
_REMOVES = (
    "A model is a folder or a file: delete that. Models from the hub are in the hub's own cache."
)
_BATCH = "Upload the file to /v1/files with purpose=batch, and name its id in POST /v1/batches."
OTHER_COMMANDS = {
    **dict.fromkeys(("pull", "download"), _FETCHES),
    "run": "`saccade serve MODEL` serves a model with a web UI, and "
    "`saccade chat --model MODEL QUESTION` asks it one question.",
    **dict.fromkeys(("list", "ls", "models"), _LISTS),
    **dict.fromkeys(("ps", "status"), _STATE),
    **dict.fromkeys(("rm", "remove", "delete"), _REMOVES),
    "stop": "Ctrl-C or SIGTERM stops `saccade serve` once running answers have ended.",
    "help": "`saccade --help` lists the commands.",
    **dict.fromkeys(("batch", "run-batch"), _BATCH),
}
"""Commands of other servers and of earlier versions, and what to do instead."""
EXAMPLES = """\
Examples:

* `saccade serve demo`
* `SACCADE_API_KEY=KEY saccade serve Qwen/Qwen3-VL-2B-Instruct --host 0.0.0.0`

All options: `--help-advanced`"""


class BasicOptions(DefaultFormatter):
    """Shows basic options only, in the panels that have any."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        shown = [entry for entry in panel.entries if not entry.names or BASIC & {*entry.names}]
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))


def tuning_help(kinds: Sequence[type]) -> str:
    """List the tuning values with their meanings, for the end of the help."""
    lines = (f"* {each.described}" for each in tuning_values(kinds).values())
    return "\n".join(("Tuning values, for --tune NAME=VALUE:", "", *lines))


def check_spelling(tokens: Sequence[str]) -> None:
    """Raise ConfigError for an option from earlier versions, with its words of today."""
    for token, after in zip(tokens, (*tokens[1:], "")):
        name, _, value = token.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and field in TUNING:
            value = value or (after if after and not after.startswith("-") else "VALUE")
            raise ConfigError(f"{name} is a tuning value now: --tune {field}={value}")
        if name.startswith("--") and field in GONE:
            raise ConfigError(f"{name} is gone: {GONE[field]}")
        shared = name == "--embedding-cache-shared" and "--embedding-cache-dir" not in tokens
        if shared and (folder := value or after) and not folder.startswith("-"):
            raise ConfigError(f"{name} names no folder now: --embedding-cache-dir {folder} {name}")


def check_command(command: str) -> None:
    """Raise ConfigError for a command that does not exist, with what to type instead."""
    names = [name for name in app if not name.startswith("-")]
    if not command or command.startswith("-") or command in names:
        return
    if instead := OTHER_COMMANDS.get(command.lower()):
        raise ConfigError(f"saccade has no command {command}. {instead}")
    what = f"saccade has no command {shown(command)}"
    if "/" in command or command.endswith(".gguf") or Path(command).is_dir():
        raise ConfigError(f"{what}. To serve this model, type `saccade serve {shown(command)}`.")
    nearest = get_close_matches(command.lower(), names, n=1)
    meant = f"Did you mean `saccade {nearest[0]}`? " if nearest else ""
    raise ConfigError(f"{what}. {meant}`saccade --help` lists the commands.")


def check_words(tokens: Sequence[str]) -> None:
    """Raise ConfigError for a word that is not UTF-8, which no message could carry."""
    for token in tokens:
        if token != sendable(token):
            raise ConfigError(f"{shown(token)} is not UTF-8: give the file or folder another name")


def flat(group: str) -> Parameter:
    """Make a dataclass's fields separate options, under a heading in the help.

    Tuning values are left out.
    """
    return Parameter(name="*", group=group, parse=NO_TUNING)


NO_TUNING = re.compile(rf"^(?!({'|'.join(TUNING)})$)")
"""Names of fields that are options."""
Config = Annotated[ExistingFile | None, Parameter(name="--config", group="Configuration")]
Tuned = Annotated[tuple[str, ...], Parameter(name="--tune", group="Tuning", consume_multiple=False)]


@app.command(
    help_formatter=DefaultFormatter() if ADVANCED else BasicOptions(),
    help_epilogue=tuning_help(SERVE_OPTIONS) if ADVANCED else EXAMPLES,
)
def serve(
    model: str = "demo",
    *,
    model_options: Annotated[ModelOptions, flat("Model")] = ModelOptions(),  # noqa: B008 - frozen
    engine: Annotated[EngineOptions, flat("Engine")] = EngineOptions(),  # noqa: B008
    caches: Annotated[CacheOptions, flat("Caches")] = CacheOptions(),  # noqa: B008
    parallel: Annotated[ParallelOptions, flat("Parallel")] = ParallelOptions(),  # noqa: B008
    media: Annotated[MediaOptions, flat("Images")] = MediaOptions(),  # noqa: B008
    server: Annotated[ServerOptions, flat("Server")] = ServerOptions(),  # noqa: B008
    edge: Annotated[ConnectionOptions, flat("Connections")] = ConnectionOptions(),  # noqa: B008
    kept: Annotated[ResponseOptions, flat("Responses")] = ResponseOptions(),  # noqa: B008
    watch: Annotated[ObservabilityOptions, flat("Observability")] = ObservabilityOptions(),  # noqa: B008
    role: Annotated[RoleOptions, flat("Role")] = RoleOptions(),  # noqa: B008 - frozen
    answers: Annotated[AnswerOptions, flat("Answers")] = AnswerOptions(),  # noqa: B008 - frozen
    tune: Tuned = (),
    config: Config = None,  # noqa: ARG001 - read by `_configured`
) -> int:
    """Serve a model at http://HOST:PORT/v1.

    Parameters
    ----------
    model:
        A folder with a Hugging Face checkpoint, a hub id such as Qwen/Qwen3-VL-2B-Instruct, a
        *.gguf file (see --mmproj), or "demo" for the built-in model.
    tune:
        A tuning value, NAME=VALUE. Repeat the option for several. Saccade normally decides these
        values. You can set them for measurements. They may change with each release. The end of
        this help lists their names.
    config:
        A TOML file with options, such as `model = "demo"` and `max-running-requests = 8`. An option
        may also be set in the environment, as SACCADE_MAX_RUNNING_REQUESTS=8. The command line has
        priority over the environment, and the environment over the file.
    """
    tuning = Tuning(tune, SERVE_OPTIONS)
    options = ServeOptions(
        tuning.of(model_options),
        tuning.of(engine),
        tuning.of(caches),
        tuning.of(parallel),
        tuning.of(media),
        tuning.of(answers),
        tuning.of(server),
        tuning.of(edge),
        tuning.of(kept),
        tuning.of(watch),
        tuning.of(role),
    )
    print(f"loading {model} ... (Ctrl-C ends it)", flush=True)  # before imports that take seconds
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    begin_imports()
    from saccade.edge.limits import raise_descriptors
    from saccade.engine.link import begin_engine

    raise_descriptors()
    with begin_engine(options.parallel.ranks) as early:
        from saccade.api.serve import serve as serve_model

        end_imports()
        return serve_model(model, options, early)


@app.command(
    default_parameter=Parameter(negative="", consume_multiple=True),
    help_epilogue=tuning_help((ConnectionOptions,)),
)
def route(
    *,
    options: Annotated[RouteOptions, flat("Router")],
    edge: Annotated[ConnectionOptions, flat("Connections")] = ConnectionOptions(),  # noqa: B008
    tune: Tuned = (),
) -> int:
    """Route each request to the server that has seen its images.

    This light proxy spreads requests over several servers. An image, a chat and a continued
    response stay with one server. If a server dies, its running answers are lost. Its chats
    continue on other servers.

    Parameters
    ----------
    tune:
        A tuning value, NAME=VALUE, for measurements. Repeat the option for several.
    """
    tuning = Tuning(tune, (ConnectionOptions,))
    from saccade.route.run import route as route_requests

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    return route_requests(options, tuning.of(edge))


@app.command(
    default_parameter=Parameter(negative="", consume_multiple=True),
    help_epilogue=tuning_help((ConnectionOptions,)),
)
def proxy(
    *,
    options: Annotated[ProxyOptions, flat("Proxy")],
    edge: Annotated[ConnectionOptions, flat("Connections")] = ConnectionOptions(),  # noqa: B008
    tune: Tuned = (),
) -> int:
    """Send the bytes of each image to a server once. Run it on the machine of your clients.

    Clients ask the proxy as they would ask the server. It sends digests in place of images that the
    server has, and images that the server lacks. Other servers get bodies as they are.

    Parameters
    ----------
    tune:
        A tuning value, NAME=VALUE, for measurements. Repeat the option for several.
    """
    tuning = Tuning(tune, (ConnectionOptions,))
    from saccade.proxy.run import proxy as run_proxy

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    return run_proxy(options, tuning.of(edge))


@deploy.command
def ray(
    model: str = "demo",
    /,
    *serve_options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[DeployOptions, flat("Deployment")] = DeployOptions(),  # noqa: B008
    spread: Annotated[SpreadOptions, flat("Ingress")] = SpreadOptions(),  # noqa: B008
) -> None:
    """Write a file with which Ray Serve runs several servers.

    Write it with `saccade deploy ray MODEL > FILE`. Start the servers with `serve run FILE`. Only
    this second command needs Ray. Install Ray with `python scripts/install.py '.[ray]'`.

    Parameters
    ----------
    model:
        A folder, a hub id, or "demo", as for saccade serve. Each server's machine must have it.
    serve_options:
        Options for saccade serve, after --. Every server gets the same options.
    """
    from saccade.route.deploy import (
        as_yaml,
        check_serve_options,
        describe_booking,
        ray_config,
        with_bookings,
    )

    check_serve_options(serve_options)
    check_spelling(serve_options)
    app.parse_args(["serve", model, *serve_options])
    options = with_bookings(options)
    told = as_yaml(ray_config(model, serve_options, options, spread))
    if options.output is None:
        print(told, end="")
    else:
        Path(options.output).write_text(told)
    where = options.output or "FILE"
    print(f"{describe_booking(model, options)}; next: serve run {where}", file=sys.stderr)


@app.command
def chat(
    question: str | None = None,
    /,
    *,
    image: tuple[ExistingFile, ...] = (),
    model: str = "demo",
    base_url: str | None = None,
    api_key: str | None = None,
    max_tokens: int = 256,
    model_options: Annotated[ModelOptions, flat("Model")] = ModelOptions(),  # noqa: B008
) -> None:
    """Ask a local engine or a server one question about images. A server also takes a session.

    Parameters
    ----------
    question:
        The question. If you leave it out, a session begins, which needs --base-url. The session
        keeps the history and takes images with /image PATH or URL. After each answer it reports
        what was cached.
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
        raise ConfigError("a session needs a server: give --base-url, or a question")
    from saccade.core.types import SamplingParams
    from saccade.llm import LLM, check_image

    sampling = SamplingParams(max_tokens=max_tokens)
    for path in image:  # what cannot work is said before the model is loaded, which takes seconds
        check_image(path)
    with LLM(
        model, **{name: getattr(model_options, name) for name in ModelOptions.__slots__}
    ) as llm:
        answer = llm.chat([{"role": "user", "content": [*image, question]}], sampling)
    Console().print(answer.text, markup=False)


@app.command
def ocr(
    files: tuple[ExistingFile, ...],
    /,
    *,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    output: Path | None = None,
    pages: str | None = None,
    prompt: str | None = None,
    task: str | None = None,
    no_repeat_ngram: int | None = None,
    max_tokens: int | None = None,
    concurrency: int = 8,
) -> int:
    """Convert the pages of PDFs and images to Markdown.

    The status is 0 if every page was converted whole. A page that fails costs no other page. With
    --output, an interrupted command goes on where it stopped if you type it again.

    Parameters
    ----------
    files:
        PDF, PNG, JPEG, WebP or TIFF files.
    model:
        The model to load, as for saccade serve, or the URL of a server. With --base-url, the
        server's name for the model.
    base_url:
        Ask this server (for example http://127.0.0.1:8000, with or without /v1) instead of loading
        a model. PDFs need a server of Saccade. Images need any OpenAI-compatible server.
    api_key:
        The server's key.
    output:
        Write the Markdown to this file, and pages done so far beside it. Default: print it.
    pages:
        The pages of each file, such as 1-5,8,12-. Default: all.
    prompt:
        What to ask about each page. Default: the model's published prompt, or a general one.
    task:
        The model's published prompt for something else than text, such as table or formula.
    no_repeat_ngram:
        The answer repeats no sequence of so many tokens within its last tokens. 0 allows it.
        Default: as published for the model.
    max_tokens:
        Maximum length of a page's text in tokens. Default: 4096, or half of the context.
    concurrency:
        How many pages are read at once.
    """
    from saccade.tools.ocr.run import OcrJob
    from saccade.tools.ocr.run import ocr as read_pages

    if base_url is None and model is not None and model.startswith(("http://", "https://")):
        base_url, model = model, None
    job = OcrJob(files, output, pages, prompt, no_repeat_ngram, max_tokens, concurrency, task)
    return read_pages(job, model, base_url, api_key)


@app.command
def demo(
    *,
    port: int = 8000,
    exit: bool = False,
    ends_with: Annotated[int | None, Parameter(show=False)] = None,
) -> int:
    """Serve the demo model and ask it about three images. Show the answers and what was cached.

    Parameters
    ----------
    port:
        Port to serve on. If it is in use, the demo takes another.
    exit:
        End after the questions instead of serving on. The status is 0 only if every answer was
        right.
    ends_with:
        The id of a process, such as `make`. The demo ends when that process ends.
    """
    from saccade.demo.run import run

    return run(port=port, exit_after=exit, starter=ends_with)


@app.command
def version() -> None:
    """Print the versions of Saccade, Python and the main libraries."""
    import platform
    from importlib.metadata import version as version_of

    names = ("torch", "tokenizers", "safetensors")
    print(
        f"saccade {__version__}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version_of(name)}" for name in names)
    )


def run() -> int:
    """Run the command line and return its exit status.

    A start-up error prints one line instead of a traceback.
    """
    if sys.argv[1:2] != ["serve"]:  # whose server takes Ctrl-C over, once it can end in order
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check_command(command := next(iter(sys.argv[1:]), ""))
        arguments = sys.argv[1:]
        if command == "serve":
            arguments = [command, *_in_our_words(arguments[1:])]
        if command in ("serve", "route", "proxy", "chat"):
            check_spelling(arguments[1:])
        check_words(arguments)
        app.config = [*_configured(arguments)] if command == "serve" else []
        status: int | None = app(arguments, result_action="return_value")
        return status or 0
    except SaccadeError as error:
        return _refuse(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _refuse(f"{shown(os.fsdecode(error.filename))}: {reason(error)}")
    finally:
        app.config = []


def _in_our_words(arguments: Sequence[str]) -> list[str]:
    from saccade.tools.foreign_options import translate, unread

    note = partial(print, file=sys.stderr)
    for line in unread(os.environ):
        note(line)
    return translate(arguments, note)


def _configured(arguments: Sequence[str]) -> Iterator[Env | Toml]:
    """Yield where else options are read from: the environment, then the file of --config."""
    yield Env("SACCADE_", command=False, show=False)
    for word, after in zip(arguments, (*arguments[1:], "")):
        name, equals, value = word.partition("=")
        if name == "--config":
            yield Toml(value if equals else after, must_exist=True, use_commands_as_keys=False)


def _refuse(why: str) -> int:
    Console(stderr=True).print(
        f"[red]error:[/red] {escape(sendable(why))}", highlight=False, soft_wrap=True
    )
    return 1
