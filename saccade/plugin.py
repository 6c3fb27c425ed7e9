"""Declarations of plugins and model families, which can be found without importing their code.

Each package in `plugins/` has a `Plugin` named `PLUGIN` in its `__init__.py`. The package of a
model family has one `Family`, or one for each generation of the model.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `saccade`. Its module is imported when the command is called."""

    name: str
    app: str  # "module:name" of a cyclopts `App`
    help: str  # one sentence
    renames: bool = False  # options of earlier versions are explained (`core/tuning.py`)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """A file format for checkpoints other than Hugging Face's, such as GGUF
    (`Checkpoints.formats`).

    The plugin writes the JSON files of a Hugging Face checkpoint, derived from such a file, to a
    directory, so that all other code can read the model as usual.
    """

    suffix: str  # file name suffix, with the dot
    # function of (model, revision, tower file): returns the folder with the derived JSON files, or
    # None if `model` is not of this format
    folder: str
    tensors: str  # function of a path: opens a `TensorFile`
    # function of (`LoadContext`, tensor name): returns how it is stored, or None if it is an
    # ordinary tensor
    stored: str


@dataclass(frozen=True, slots=True)
class Offer:
    """An implementation that a plugin provides for one of the core's extension points.

    `asked` is called first, to decide whether it is used. The module of `build` is imported only if
    `asked` returns True.
    """

    build: str
    asked: str


@dataclass(frozen=True, slots=True)
class LogitRule:
    """A change to the logits of certain sequences before a token is sampled."""

    build: str  # function of (`Open`, vocabulary size, stop ids, device): returns a `RowEdit`
    asked: str  # function of an `Open`: returns True if the rule applies to the sequence
    last: bool = False  # apply it after penalties and biases instead of before them


@dataclass(frozen=True, slots=True)
class StepRule:
    """A step of preparing requests: when it runs, and for which requests.

    The step's module is imported when the first such request arrives. `front/step_order.py` defines
    the points of the order, and the rules of the core.
    """

    name: str  # the feature's name, optionally followed by a dot and the step's own name
    after: str  # a point of the order, or the name of the rule that it follows
    when: str  # name of a request's extra, or function of a `Preparation`; "": every request
    step: str  # class, constructed from a `StepContext`
    answer: str = ""  # its method to call for a request that generates an answer
    read: str = ""  # its method to call when only the prompt is read


@dataclass(frozen=True, slots=True)
class MediaCard:
    """A type of media that requests may contain, such as documents. `media/kind.py` has the
    protocol of its code.
    """

    kind: str  # value of `kind` of the sources that it reads
    build: str  # class, constructed from a `KindContext`, that implements `MediaKind`
    readable: str = ""  # function of a `FamilySpec`: what the model can read of this kind of media
    starts: tuple[bytes, ...] = ()  # prefixes of its files
    marks: tuple[bytes, ...] = ()  # magic bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """What a plugin adds to the HTTP server: routes, logs and request hooks."""

    routes: str | None = None  # function of an `ApiContext`: returns Starlette routes
    paths: tuple[str, ...] = ()  # paths of all routes, in Starlette's syntax
    keyless: tuple[str, ...] = ()  # the paths among them that need no API key
    operations: str | None = None  # the `Description` of its routes for /openapi.json
    # function of an `ApiContext`: returns True if background work is pending
    waiting: str | None = None
    answer_log: str | None = None  # function of `ServeOptions`: returns an `api.handlers.AnswerLog`
    # function of (`ServeOptions`, `Metrics`): returns a `TimelineRecorder`
    recorder: str | None = None
    # class, constructed from a `RequestManager`, that implements `api.handlers.WatchBody`
    body_watcher: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What a plugin adds to requests: types of media, steps that prepare them, and output
    formats.
    """

    steps: tuple[StepRule, ...] = ()  # steps of preparing a request
    media: tuple[MediaCard, ...] = ()  # kinds of media that requests may contain
    # class, constructed from `ServeOptions` and `Metrics`, that implements `UrlReader`
    fetcher: str | None = None
    # function of `ServeOptions`: returns `media.sources.uploaded.UploadedFiles`
    uploads: str | None = None
    # `media.embedding_source.EmbeddingSource`, built from (options, arena, metrics); `asked` gets
    # the `ServeOptions`
    embeddings: Offer | None = None
    # class that implements the engine's `GrammarRequests`, built for the first answer with
    # structured output
    grammars: str | None = None
    tool_formats: str | None = None  # tuple of `text.answer.tool_format.ToolFormat`


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What a plugin adds to the engine and its scheduler."""

    # replaces the core's, see `engine.schedulers.build_scheduler`; `asked` gets the `EngineConfig`
    scheduler: Offer | None = None
    step_part: Offer | None = None  # a `StepPart`; `build` and `asked` get the `PartContext`
    # a `StepPart` for requests with cache settings, built from the `PartContext`
    cache_part: str | None = None
    # class, constructed from the plugin's options, the `EngineConfig` and the `Scheduler`, that
    # implements `EnginePart`
    engine_part: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What a plugin adds to the caches: tiers and snapshots. `asked` gets the `EngineConfig` unless
    noted otherwise.
    """

    # `PageTiers`, built from (config, spec, pages on disk, pinned share)
    page_tiers: Offer | None = None
    page_loads: Offer | None = None  # `PageLoads`; `build` and `asked` get the `PartContext`
    page_memory: Offer | None = None  # `PageMemory` of one rank
    # see `runtime.tiers.open_tiers`; `asked` gets (budgets, a tensor on the device)
    embedding_tiers: Offer | None = None
    snapshots: Offer | None = None  # `Snapshots`; `build` and `asked` get the config and the spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a plugin adds to the workers: kernels, collectives and changes to logits."""

    # replaces the core's, built from the arguments of `load_net`; `asked` gets the `Load`
    worker: Offer | None = None
    # pairs: PyTorch device type, the `kernels.backend.KernelBackend` for it
    backends: tuple[tuple[str, str], ...] = ()
    # function of (backend, rank, number of ranks, memory file): returns the `parallel.Shard`
    collectives: str | None = None
    # pairs: tag of a `RowExtra`, class of its `StatePart`
    state_parts: tuple[tuple[str, str], ...] = ()
    logit_rules: tuple[LogitRule, ...] = ()
    # class, constructed from a `Worker`, that implements `runtime.changes.ModelChanges`
    changes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What a plugin adds to loading: model families, file formats and quantization."""

    families: str | None = None  # package with `Family` records, in itself and in its subpackages
    formats: tuple[CheckpointFormat, ...] = ()
    # function of config.json as a `Section`: raises CheckpointError if its quantization is not
    # supported
    quantization: str | None = None
    # `StoredForms`, built from (config.json, `LoadContext`); `asked` gets the config.json
    stored_forms: Offer | None = None
    parity: str | None = None  # function of (front, model, `ServeOptions`) for `--parity generate`


@dataclass(frozen=True, slots=True)
class Plugin:
    """A feature that is found without importing its modules. References to code have the form
    "module:name".

    What the plugin adds to the server is in the groups `http` to `checkpoints`.

    Modules are imported when they are first needed: the options when the command line is parsed,
    routes at the first request to one of their paths, and an `Offer` when its `asked` function
    returns True.
    """

    name: str
    _: KW_ONLY
    # plugins whose modules it imports; it is disabled if one is missing
    requires: tuple[str, ...] = ()
    # dataclass with a group of options. If the core reads them, it is one of `core/settings.py` or
    # a subclass of one.
    options: str | None = None
    # function of `ServeOptions`: returns True if the plugin is enabled. By default it is enabled,
    # except with --role encode, where only plugins with kinds of media are.
    asked: str | None = None
    # disabled if no option of any plugin is set, without importing the module of `asked`
    needs_options: bool = False
    commands: tuple[Command, ...] = ()
    # `Upstreams` of a router, built from a `RouterContext`; `asked` gets the `RouteOptions`
    upstreams: Offer | None = None
    http: Http = Http()
    requests: Requests = Requests()
    scheduling: Scheduling = Scheduling()
    caches: Caches = Caches()
    runtime: Runtime = Runtime()
    checkpoints: Checkpoints = Checkpoints()

    @property
    def is_http(self) -> bool:
        """True if the plugin has no effect without the HTTP server."""
        http = self.http
        return any((http.routes, http.recorder, http.answer_log, http.body_watcher))


@dataclass(frozen=True, slots=True)
class Family:
    """A model family that is found without importing its modules. References to code have the form
    "module:name".
    """

    spec: str  # function that reads the `FamilySpec` of a checkpoint
    model: str  # the `FamilyModel` built for a spec
    architectures: tuple[str, ...]  # `architectures` in config.json
    # `model_type` in config.json, for checkpoints without `architectures`; also the values of
    # `FamilySpec.family`
    model_types: tuple[str, ...]
    # a Python package, and the extra of the same name. It serves all architectures that no other
    # family supports.
    package: str | None = None
    pixels: str | None = None  # module with the family's own image preprocessing (`OwnPixels`)
    # the `GgufFacts` of its models, imported only for GGUF files
    gguf: str | None = None
