"""The command line: `saccade serve` and `version`, and the names of all other commands.

The other commands are from the core, from plugins, and from other distributions that register entry
points (`tools/brought.py`). Their modules are imported when they are called. Options are defined as
dataclasses in `core/options.py` and in plugins.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter
from cyclopts.config import Env, Toml
from cyclopts.help import DefaultFormatter, HelpPanel
from cyclopts.types import ExistingFile
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape

from saccade import __version__
from saccade.arguments import Tuned, joined, tuning_help
from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.given_paths import reason, sendable, shown
from saccade.core.logs import configure_logging
from saccade.core.options import ServeOptions
from saccade.core.settings import LogSettings
from saccade.core.tuning import GONE, Tuning, basic_options, tuning_values
from saccade.ipc.memory import begin_imports, end_imports
from saccade.plugin import Command
from saccade.plugins import option_groups, plugins

HELP = ("--help", "--help-advanced", "-h")
COMMANDS = (
    Command(
        "chat",
        "saccade.tools.chat_command:app",
        "Ask a local model or a server one question about images, or chat with a server.",
        renames=True,
    ),
    Command(
        "demo",
        "saccade.demo.command:app",
        "Serve the demo model and ask it about three images. Show the answers and what was cached.",
    ),
    *chain.from_iterable(plugin.commands for plugin in plugins()),
)
"""Commands whose modules are imported when they are called, including those of plugins."""


def explain(error: CycloptsError) -> RenderableType:
    """Return the error message for an invalid command line. If --help is misspelled, report only
    that.
    """
    for token in {*sys.argv[1:]}.difference(HELP):
        if token.startswith("-") and (meant := get_close_matches(token, HELP, n=1, cutoff=0.75)):
            return CycloptsPanel(f"Unknown option: {token}. Did you mean {meant[0]}?")
    return CycloptsPanel(error)


app = App(
    name="saccade",
    help="Serve vision-language models through an OpenAI-compatible API. A repeated image costs "
    "only a hash.",
    version=__version__,
    default_parameter=Parameter(negative=""),
    help_flags=HELP,
    error_formatter=explain,
)
for command in COMMANDS:
    app.command(command.app, name=command.name, help=command.help)

ADVANCED = "--help-advanced" in sys.argv
"""True if the help must list every option."""

HEADINGS = {
    "model": "Model",
    "engine": "Engine",
    "caches": "Caches",
    "media": "Images",
    "server": "Server",
    "edge": "Connections",
    "answers": "Answers",
}
"""Headings for the groups of `ServeOptions` in --help. A plugin's group has the plugin's name as
its heading.
"""
OWN = [(name, type(getattr(ServeOptions(), name)), HEADINGS[name]) for name in HEADINGS]


def is_plain(arguments: Sequence[str], environment: Iterable[str]) -> bool:
    """Return True for `serve` if all options are numbers, strings or switches of the core.

    Any other option may belong to a plugin, or may be spelled as in another server.
    """
    kinds = [kind for _, kind, _ in OWN]
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    free = {name for name, hint in hints.items() if get_origin(hint) not in (Literal, tuple)}
    free -= tuning_values(kinds).keys()
    options = {f"--{name.replace('_', '-')}" for name in free}
    given = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    variables = {f"SACCADE_{name.upper()}" for name in free}
    read = {name for name in environment if name.startswith(("SACCADE_", "SGLANG_", "VLLM_"))}
    return arguments[:1] == ["serve"] and given <= options and read <= variables


PLAIN = is_plain(sys.argv[1:], os.environ)
"""True if the command line needs no options of plugins or other servers, and no other commands, so
they are not imported.
"""
GROUPS = [*OWN]
if not PLAIN:
    from saccade.tools.brought import join

    join(app)
    GROUPS += (
        (plugin.name, kind, plugin.name.replace("_", " ").capitalize())
        for plugin, kind in option_groups().items()
    )
SERVE_OPTIONS = tuple(kind for _, kind, _ in GROUPS)
BASIC = basic_options(SERVE_OPTIONS)
TUNING = tuning_values(SERVE_OPTIONS)

_FETCHES = "`saccade serve MODEL` downloads a model from the hub if it is not on this machine."
_LISTS = (
    "`GET /v1/models` lists what a running server serves. Models are folders, GGUF files, and hub "
    "ids, which the hub's own cache keeps."
)
_STATE = "One server serves one model. `GET /health` and the web UI show its state."
_REMOVES = (
    "A model is a directory or a file: delete it. Models from the hub are in the hub's own cache."
)
_BATCH = "Upload the file to /v1/files with purpose=batch, and name its id in POST /v1/batches."
OTHER_COMMANDS = {
    **dict.fromkeys(("pull", "download"), _FETCHES),
    "run": "`saccade serve MODEL` serves a model with a web UI, and "
    "`saccade chat --model MODEL QUESTION` asks it one question.",
    **dict.fromkeys(("list", "ls", "models"), _LISTS),
    **dict.fromkeys(("ps", "status"), _STATE),
    **dict.fromkeys(("rm", "remove", "delete"), _REMOVES),
    "stop": "Ctrl-C or SIGTERM stops `saccade serve` once the requests in flight have finished.",
    "help": "`saccade --help` lists the commands.",
    **dict.fromkeys(("batch", "run-batch"), _BATCH),
}
"""Commands of other servers and of earlier versions, with what to use instead."""
EXAMPLES = """\
Examples:

* `saccade serve demo`
* `SACCADE_API_KEY=KEY saccade serve Qwen/Qwen3-VL-2B-Instruct --host 0.0.0.0`
* `saccade serve --config saccade.toml`, with lines such as `max-running-requests = 8`
* `SACCADE_MAX_RUNNING_REQUESTS=8 saccade serve demo`

All options: `--help-advanced`"""


class BasicOptions(DefaultFormatter):
    """A help formatter that shows only basic options, and leaves out panels that have none."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        shown = [entry for entry in panel.entries if not entry.names or BASIC & {*entry.names}]
        if shown:
            super().__call__(console, options, panel.copy(entries=shown))


def check_spelling(tokens: Sequence[str]) -> None:
    """Raise ConfigError, with the new spelling, if an option of an earlier version is used."""
    for token, after in zip(tokens, (*tokens[1:], "")):
        name, _, value = token.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and field in TUNING:
            value = value or (after if after and not after.startswith("-") else "VALUE")
            raise ConfigError(f"{name} is a tuning value now: --tune {field}={value}")
        if name.startswith("--") and field in GONE:
            raise ConfigError(f"{name} was removed: {GONE[field]}")
        shared = name == "--embedding-cache-shared" and "--embedding-cache-dir" not in tokens
        if shared and (folder := value or after) and not folder.startswith("-"):
            raise ConfigError(
                f"{name} no longer takes a directory: --embedding-cache-dir {folder} {name}"
            )


def check_command(command: str) -> None:
    """Raise ConfigError, with a suggestion, if there is no command with this name."""
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
    """Raise ConfigError if an argument is not valid UTF-8, because it could not be sent in
    messages.
    """
    for token in tokens:
        if token != sendable(token):
            raise ConfigError(f"{shown(token)} is not UTF-8: rename the file or directory")


NO_OPTIONS = joined(GROUPS)()
if TYPE_CHECKING:
    Options = Any
else:
    Options = Annotated[type(NO_OPTIONS), Parameter(name="*")]
Config = Annotated[ExistingFile | None, Parameter(name="--config", group="Configuration")]


@app.command(
    help_formatter=DefaultFormatter() if ADVANCED else BasicOptions(),
    help_epilogue=tuning_help(SERVE_OPTIONS) if ADVANCED else EXAMPLES,
)
def serve(
    model: str = "demo",
    *,
    options: Options = NO_OPTIONS,
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
    set_to = {each.name: tuning.of(getattr(options, each.name)) for each in fields(options)}
    own = {name: set_to.pop(name) for name in HEADINGS}
    chosen = ServeOptions(**own, extras=tuple(set_to.values()))
    print(f"loading {model} ... (Ctrl-C stops it)", flush=True)  # before imports that take seconds
    configure_logging(chosen.of(LogSettings).log_format)
    begin_imports()
    from saccade.edge.limits import raise_descriptors
    from saccade.engine.link import begin_engine

    raise_descriptors()
    with begin_engine(chosen.engine_settings.parallel.ranks) as early:
        from saccade.api.serve import serve as serve_model

        end_imports()
        return serve_model(model, chosen, early)


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

    An error at start-up is printed as one line, without a traceback.
    """
    if sys.argv[1:2] != ["serve"]:
        # `serve` keeps the early handler until its server can shut down cleanly.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check_command(command := next(iter(sys.argv[1:]), ""))
        arguments = sys.argv[1:]
        if command == "serve" and not PLAIN:
            arguments = [command, *_translate_options(arguments[1:])]
        if command in ("serve", *(each.name for each in COMMANDS if each.renames)):
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


def _translate_options(arguments: Sequence[str]) -> list[str]:
    from saccade.tools.foreign_options import translate, unread

    note = partial(print, file=sys.stderr)
    for line in unread(os.environ):
        note(line)
    return translate(arguments, note)


def _configured(arguments: Sequence[str]) -> Iterator[Env | Toml]:
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
