"""What features and model families state about themselves: `PLUGIN` in the `__init__.py` of a
folder in plugins/, and a `Family`, or one per generation, in that of a family's folder.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `saccade`, imported when it is called."""

    name: str
    app: str  # "module:name" of a cyclopts `App`
    help: str  # one sentence


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Files of a format of their own that serve as a checkpoint, as `Plugin.formats` lists them.

    The JSON files that all else reads are made from them, in a folder that lists their paths.
    """

    suffix: str  # of a file's name, with the dot
    folder: str  # function of a model, revision, tower's file: the folder; None: not its own
    tensors: str  # function of a path that opens a `TensorFile`
    stored: (
        str  # function of a `LoadContext` and a name; None: the tensor is stored as plain numbers
    )


@dataclass(frozen=True, slots=True)
class Offer:
    """What a plugin builds for a socket. `build` is imported only where `asked` returns True."""

    build: str
    asked: str


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Changes the logits of sequences that ask for it, before a token is sampled."""

    build: str  # function of an `Open`, vocab size, stop ids and device: a `RowEdit`
    asked: str  # function of an `Open`
    last: bool = False  # after penalties and biases, not before them


@dataclass(frozen=True, slots=True)
class StepRule:
    """A step of preparing requests: where it comes, and which requests it joins.

    Its module is imported at the first request that it joins. `front/step_order.py` has the points
    of the order, and the rules of shared code.
    """

    name: str  # the feature's and, behind a dot, the step's
    after: str  # a point of the order, or the rule that it follows
    when: str  # the name of a request's extra, or function of a `Preparation`; "": always
    step: str  # class that takes a `StepContext`
    answer: str = ""  # its method, while a request for an answer is prepared
    read: str = ""  # its method, while a prompt alone is read


@dataclass(frozen=True, slots=True)
class MediaCard:
    """A kind of media, stated without being imported. `media/kind.py` has its protocol."""

    kind: str  # of the sources that it reads
    build: str  # class that takes a `KindContext` and answers `MediaKind`
    readable: str = ""  # function of a `FamilySpec`: what of it can be read, for `Media.readable`
    starts: tuple[bytes, ...] = ()  # how its files begin
    marks: tuple[bytes, ...] = ()  # magic bytes


@dataclass(frozen=True, slots=True)
class Plugin:
    """A feature, found without importing its modules. Names are written "module:name".

    A plugin's modules are imported when they are first needed: its options when a command line is
    read, its routes at the first request for one of its paths, and what it offers to a socket where
    that is asked for.
    """

    name: str
    _: KW_ONLY
    requires: tuple[str, ...] = ()  # plugins whose modules it imports: absent without them
    options: str | None = None  # dataclass: a group of options; if shared code reads them, one of
    # `core/settings.py`, or derived from it
    asked: str | None = (
        # function of `ServeOptions`: is it enabled? default: if the server has clients, or the
        # plugin adds kinds of media, which servers of role encode read for others
        None
    )
    routes: str | None = None  # function of an `ApiContext` that returns routes
    paths: tuple[str, ...] = ()  # all that the routes answer, in Starlette's form
    keyless: tuple[str, ...] = ()  # of the paths, those that answer without the API key
    families: str | None = None  # package: its `Family` records, and those of the folders in it
    formats: tuple[CheckpointFormat, ...] = ()
    parity: str | None = None  # function of a front, model and `ServeOptions`: `--parity generate`
    operations: str | None = None  # `Description` of the routes, for /openapi.json
    waiting: str | None = None  # function of an `ApiContext`: is there work without a request?
    commands: tuple[Command, ...] = ()
    # class built from the plugin's options, the `EngineConfig` and the `Scheduler`: an `EnginePart`
    engine_part: str | None = None
    answer_log: str | None = None  # function of `ServeOptions`: an `api.handlers.AnswerLog`
    recorder: str | None = None  # function of `ServeOptions` and `Metrics`: a `TimelineRecorder`
    body_watcher: str | None = None  # class of a `RequestManager`: an `api.handlers.WatchBody`
    fetcher: str | None = None  # class of `ServeOptions` and `Metrics`: a `UrlReader`
    # The scheduler's, each built from a `PartContext`
    step_part: Offer | None = None  # a `StepPart`; asked of the `PartContext`
    cache_part: str | None = None  # a `StepPart` of requests that ask something from the caches
    page_loads: Offer | None = None  # `PageLoads`; asked of the `PartContext`
    # The caches' and a worker's; called with the `EngineConfig` unless noted
    page_tiers: Offer | None = None  # `PageTiers`, of config, spec, pages found, pinned share
    snapshots: Offer | None = None  # `Snapshots`, of config and spec; asked of both
    page_memory: Offer | None = None  # `PageMemory`, of the pool's
    embedding_tiers: Offer | None = None  # as `runtime.tiers.open_tiers`; asked of budgets, device
    state_parts: tuple[tuple[str, str], ...] = ()  # tag of a `RowExtra`, class of its `StatePart`
    logit_rules: tuple[LogitRule, ...] = ()
    changes: str | None = None  # class of a `Worker`: `runtime.changes.ModelChanges`
    # Instead of those that answer prompts
    scheduler: Offer | None = None  # as `engine.schedulers.build_scheduler`; of the `EngineConfig`
    worker: Offer | None = None  # of spec, folder, as `load_net`: makes a worker; of the `Load`
    stored_forms: Offer | None = None  # `StoredForms`, of config.json, `LoadContext`; asked of json
    upstreams: Offer | None = None  # `Upstreams`, of a `RouterContext`; asked of `RouteOptions`
    # class of the engine's `GrammarRequests`, built when the first answer is to be held to a form
    grammars: str | None = None
    steps: tuple[StepRule, ...] = ()  # of preparing requests
    media: tuple[MediaCard, ...] = ()  # kinds that requests may hold
    # (kind of device as PyTorch calls it, its `kernels.backend.KernelBackend`)
    backends: tuple[tuple[str, str], ...] = ()

    @property
    def is_http(self) -> bool:
        """Return True if only a server has a use for the plugin."""
        return any((self.routes, self.recorder, self.answer_log, self.body_watcher))


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, found without importing its modules."""

    spec: str  # the function that reads a checkpoint's `FamilySpec`
    model: str  # the `FamilyModel` for a spec. Both are written "module:name".
    architectures: tuple[str, ...]  # names in config.json
    # names in config.json where it has no architectures, and the values of `FamilySpec.family`
    model_types: tuple[str, ...]
    # a Python package, and an extra with the same name, which serves architectures that no other
    # family names
    package: str | None = None
    pixels: str | None = None  # a module with the family's own operation on images (`OwnPixels`)
    # the `GgufFacts` about its models in GGUF files, written "module:name". Read for such files
    # only.
    gguf: str | None = None
