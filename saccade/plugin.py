"""The records with which plugins and model families describe themselves, without importing their
modules. A directory in plugins/ has a `Plugin` named `PLUGIN` in its `__init__.py`, and a family's
directory has one or several `Family` records.
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
    """A checkpoint format other than safetensors, such as GGUF.

    For a model in this format, a directory is created that contains the JSON files of a Hugging
    Face checkpoint and lists the paths of the model's files. Functions are written "module:name".
    """

    suffix: str  # of file names, with the dot
    # function of (model, revision, vision encoder's file) that returns the directory, or `None` if
    # the model has another format
    folder: str
    tensors: str  # function of a path that opens a `TensorFile`
    # function of (`LoadContext`, tensor name) that returns the `StoredTensor`, or `None` if the
    # tensor is not quantized
    stored: str


@dataclass(frozen=True, slots=True)
class Offer:
    """An object that a plugin provides if it is enabled. `build` is imported only if `asked`
    returns True. Both are functions (or classes) written "module:name".
    """

    build: str
    asked: str


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Changes the logits of some sequences before sampling."""

    build: str  # function of (`Open`, vocab size, stop ids, device) that returns a `RowEdit`
    asked: str  # function of an `Open`: does the rule apply to this sequence?
    last: bool = False  # apply it after penalties and biases, instead of before


@dataclass(frozen=True, slots=True)
class StepRule:
    """A step of preparing requests: its position in the order of steps, and which requests need it.

    Its module is imported with the first request that needs it. `front/step_order.py` has the
    order, and the core's own rules.
    """

    name: str  # "feature.step"
    after: str  # a point of the order, or the name of the rule that it follows
    when: str  # the name of a request's extra, or a function of a `Preparation`; "": always
    step: str  # class whose constructor takes a `StepContext`
    answer: str = ""  # its method for requests that generate output
    read: str = ""  # its method for requests that only compute a prompt, such as embeddings


@dataclass(frozen=True, slots=True)
class MediaCard:
    """Describes a kind of media without importing it. `media/kind.py` has the protocol
    `MediaKind`.
    """

    kind: str  # its name, which is `kind` of its sources
    build: str  # class whose constructor takes a `KindContext`, and that implements `MediaKind`
    readable: str = ""  # function of a `FamilySpec` that returns its entries in `Media.readable`
    starts: tuple[bytes, ...] = ()  # signatures at the start of its files
    marks: tuple[bytes, ...] = ()  # signatures anywhere near the start of its files


@dataclass(frozen=True, slots=True)
class Plugin:
    """Describes a feature without importing its modules. Functions and classes are written
    "module:name".

    A plugin's modules are imported when they are first needed: its options when a command line is
    parsed, its routes with the first request for one of its paths, and other objects when the core
    uses them.
    """

    name: str
    _: KW_ONLY
    requires: tuple[str, ...] = ()  # plugins that it imports; without them it is disabled
    # dataclass with a group of options. If shared code reads them, it is one of `core/settings.py`
    # or derived from one.
    options: str | None = None
    # function of `ServeOptions`: is the plugin enabled? By default it is enabled if the server has
    # clients, or if the plugin adds kinds of media, which servers with role encode need too.
    asked: str | None = None
    routes: str | None = None  # function of an `ApiContext` that returns routes
    paths: tuple[str, ...] = ()  # the paths of all routes, in Starlette's form
    keyless: tuple[str, ...] = ()  # those of the paths that do not require the API key
    families: str | None = None  # package with `Family` records, in it and its subpackages
    formats: tuple[CheckpointFormat, ...] = ()
    parity: str | None = None  # function of (front, model, `ServeOptions`), for `--parity generate`
    operations: str | None = None  # `Description` of the routes, for /openapi.json
    waiting: str | None = None  # function of an `ApiContext`: is there work without a request?
    commands: tuple[Command, ...] = ()
    # class of an `EnginePart`, created from (the plugin's options, `EngineConfig`, `Scheduler`)
    engine_part: str | None = None
    answer_log: str | None = None  # function of `ServeOptions` that returns an `AnswerLog`
    recorder: str | None = None  # function of (`ServeOptions`, `Metrics`): `TimelineRecorder`
    fetcher: str | None = None  # class of a `UrlReader`, from (`ServeOptions`, `Metrics`)
    # ---- parts of the scheduler. `build` and `asked` are called with a `PartContext`.
    step_part: Offer | None = None  # `StepPart`
    cache_part: str | None = None  # `StepPart` for requests that query or control the caches
    page_loads: Offer | None = None  # `PageLoads`
    # ---- caches and workers. `asked` is called with the `EngineConfig` unless noted.
    page_tiers: Offer | None = None  # `PageTiers`, from (config, spec, pages found, pinned share)
    snapshots: Offer | None = None  # `Snapshots`, from (config, spec); asked(config, spec)
    page_memory: Offer | None = None  # `PageMemory`
    embedding_tiers: Offer | None = None  # `EmbeddingTiers`; asked(budgets, an empty embedding)
    state_parts: tuple[tuple[str, str], ...] = ()  # (tag of a `RowExtra`, class of its `StatePart`)
    logit_rules: tuple[LogitRule, ...] = ()
    changes: str | None = None  # class of `ModelChanges`, created from a `Worker`
    # ---- replacements of the core's own classes
    scheduler: Offer | None = None  # as `engine.schedulers.build_scheduler`; asked(`EngineConfig`)
    worker: Offer | None = None  # creates a worker, with the arguments of `load_net`; asked(`Load`)
    # `StoredForms`, from (config.json, `LoadContext`); asked(config.json)
    stored_forms: Offer | None = None
    upstreams: Offer | None = None  # `Upstreams`, from a `RouterContext`; asked(`RouteOptions`)
    # class of the engine's `GrammarRequests`, created with the first request that has a grammar
    grammars: str | None = None
    steps: tuple[StepRule, ...] = ()  # steps of preparing requests
    media: tuple[MediaCard, ...] = ()  # kinds of media
    # (PyTorch's device type, name of a `kernels.backend.KernelBackend`)
    backends: tuple[tuple[str, str], ...] = ()

    @property
    def is_http(self) -> bool:
        """Whether the plugin is only useful in an HTTP server."""
        return any((self.routes, self.recorder, self.answer_log))


@dataclass(frozen=True, slots=True)
class Family:
    """Describes a model family without importing its modules. Functions and classes are written
    "module:name".
    """

    spec: str  # function that reads a checkpoint's `FamilySpec`
    model: str  # class of the `FamilyModel`, created from a spec
    architectures: tuple[str, ...]  # `architectures` in config.json
    # `model_type` in config.json, for files without `architectures`, and values of
    # `FamilySpec.family`
    model_types: tuple[str, ...]
    # A Python package (and an extra of the same name) that runs the architectures that no other
    # family lists.
    package: str | None = None
    pixels: str | None = None  # module with the family's preprocessing operation (`OwnPixels`)
    gguf: str | None = None  # `GgufFacts` about its models in GGUF files
