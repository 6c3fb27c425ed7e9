"""Without a GPU: on tensors that only claim to be on one, the networks mix no devices, and ask for
no value that the host would wait for.

What is computed, tests/gpu checks where there is a GPU. torch's fake tensors know shapes, dtypes
and devices, and raise for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

import saccade.plugins.gpu.triton
from saccade.core.config import EncoderConfig
from saccade.core.errors import CheckpointError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.plan import Open
from saccade.core.types import SamplingParams
from saccade.families.registry import family_model, load_spec
from saccade.kernels.matrix import (
    CHUNK,
    EACH,
    FP8,
    MAX_UNQUANTIZED_ROWS,
    Fp8Matrix,
    Int4Matrix,
    Matrix,
)
from saccade.kernels.reference.fp8 import BLOCK
from saccade.nn.moe import MoEShape, SparseMLP
from saccade.nn.protocol import Batch, FamilyNet
from saccade.nn.weights import Part
from saccade.parallel import UNSHARDED
from saccade.plugins.gpu.cuda.graphs import eager
from saccade.plugins.gpu.cuda.pack_graphs import CapturedPacks
from saccade.plugins.gpu.triton.ops import TritonOps
from saccade.plugins.models.gemma4.spec import Gemma4Spec
from saccade.runtime.attention import attention_for
from saccade.runtime.row_parts import Draws
from saccade.runtime.sampling.sampler import Sampler
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.dummy import DummyWeights
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.lab.qwen import grids, qwen
from tests.fixtures import tiny

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class Indexing(TorchFunctionMode):
    """What builds of torch without CUDA refuse to fake tensors of it in Python, by way of the
    operators beneath.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.__getitem__:
            return part(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            return (
                aten.copy_(part(x, index), value)
                if isinstance(value, torch.Tensor)
                else aten.fill_(part(x, index), value)
            )
        if func is torch.Tensor.copy_:
            return aten.copy_(*args, **(kwargs or {}))
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            return aten._to_copy(args[0], device=args[1])
        return func(*args, **(kwargs or {}))


def part(x: torch.Tensor, index: object) -> torch.Tensor:
    """x[index] for slices, numbers, places, None and a leading ellipsis."""
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    for each in parts:
        if each is Ellipsis:
            dim = x.dim() - len(parts) + 1
            continue
        if isinstance(each, int):
            x = aten.select(x, dim, each)
            continue
        if each is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(each, torch.Tensor):
            x = aten.index(x, [None] * dim + [each])
        else:
            assert isinstance(each, slice)
            x = aten.slice(x, dim, each.start, each.stop)
        dim += 1
    return x


class Blank(DummyWeights):
    """Weights without values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, CUDA, ops=TritonOps())

    def load(self, *parts: Part) -> torch.Tensor:
        shape = (sum(each.wanted[0] for each in parts), *parts[0].wanted[1:])
        return torch.empty(shape, dtype=self.dtype, device=CUDA)


class Eight(Blank):
    """Matrices of products are FP8, with scales of rows, or in blocks where sizes allow these."""

    def load_matrix(self, *parts: Part) -> Matrix:
        return eight(self.load(*parts))


def eight(whole: torch.Tensor) -> Fp8Matrix:
    outputs, inputs = whole.shape
    in_blocks = inputs % BLOCK == outputs % BLOCK == 0
    group = BLOCK if in_blocks else inputs
    groups = inputs // group
    scales = torch.empty((outputs, groups), device=CUDA)
    padded = groups + -groups % 4
    blocks = torch.empty((outputs // BLOCK, padded), device=CUDA).t() if in_blocks else None
    return Fp8Matrix(aten._to_copy(whole, dtype=FP8), scales, group, True, blocks)


class BlankApart(Blank):
    """The same of a checkpoint that keeps experts apart."""

    def has(self, _name: str, /) -> bool:
        return False


class BlankInt4(Blank):
    """The same with matrices of 4 bits."""

    def load_matrix(self, *parts: Part) -> Matrix:
        outputs, inputs = sum(part.wanted[0] for part in parts), parts[0].wanted[1]
        chunks = -(-inputs // CHUNK)
        words = torch.empty((outputs, chunks * CHUNK // EACH), dtype=torch.int32, device=CUDA)
        scales = torch.empty((1, outputs), dtype=torch.float16, device=CUDA)
        zeros = torch.empty((1, outputs), dtype=torch.uint8, device=CUDA)
        return Int4Matrix(words, scales, zeros, chunks * CHUNK, inputs)


class Launches:
    """In place of a module's Triton kernels: counts what would have been launched, and sees that
    all tensors are on the device.
    """

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        assert all(isinstance(each, int) and each > 0 for each in grid), "a grid is known"

        def launch(*args: object, **kwargs: object) -> None:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            assert tensors and all(each.device == CUDA for each in tensors)
            self.count += 1

        return launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    for name in (each.name for each in iter_modules(saccade.plugins.gpu.triton.__path__)):
        module = import_module(f"saccade.plugins.gpu.triton.{name}")
        kernels = [each for each in vars(module) if isinstance(vars(module)[each], KernelInterface)]
        for each in kernels:
            monkeypatch.setattr(module, each, launches)
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing(), torch.inference_mode():
        yield launches


@pytest.fixture(scope="module", params=["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilySpec:
    return load_spec(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


def blank(spec: FamilySpec, dtype: torch.dtype, kind: type[Blank] = Blank) -> FamilyNet:
    net: FamilyNet = family_model(spec).build(kind(dtype), UNSHARDED, UNSHARDED)
    return net


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("sizes", [(), (64, 256)], ids=["packed", "graph"])
@pytest.mark.parametrize("attention", ["flash", "triton"])
def test_a_vision_tower_stays_on_its_device(
    spec: FamilySpec,
    gpu: Launches,
    attention: str,
    sizes: tuple[int, ...],
) -> None:
    net = blank(spec, torch.bfloat16)
    like = torch.empty(0, dtype=torch.bfloat16, device=CUDA)
    config = EncoderConfig(attention, sizes)
    graphs = CapturedPacks(net, config, like, capture=eager) if sizes else None
    encoder = PackedEncoder(net, PositionCache(spec, net.vision, Metrics()), config, like, graphs)
    factor = qwen(spec).images.factor
    pictures = [
        torch.empty((h * factor, w * factor, 3), dtype=torch.uint8, device=CUDA)
        for h, w in ((2, 3), (7, 5))
    ]
    for rows, tokens in zip(encoder.encode(pictures, grids(spec, pictures)), (6, 35), strict=True):
        assert rows.shape == (tokens, spec.embedding_width) and rows.device == CUDA


@pytest.mark.sparse
@pytest.mark.parametrize(
    "rows", [((1, 40), (7, 7), (6, 30)), ((8, 8), (6, 6)), ((1, 5),)], ids=["mixed", "cold", "one"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_language_model_stays_on_its_device(
    spec: FamilySpec, gpu: Launches, dtype: torch.dtype, rows: tuple[tuple[int, int], ...]
) -> None:
    """Rows of (queries, tokens in all)."""
    net = blank(spec, dtype)
    logits = forward(net, dtype, [length for length, _ in rows])
    assert logits.device == CUDA and logits.dtype == torch.float32 and logits.shape[0] == 2
    assert gpu.count


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Gemma4Spec:
    """Whose tower clamps nothing: its limits are values, though asked for at load alone."""
    folder = tmp_path_factory.mktemp("gemma4")
    unclamped = {"use_clipped_linears": False}
    spec = load_spec(tiny.make_checkpoint(folder, "gemma4", vision=unclamped))
    assert isinstance(spec, Gemma4Spec)
    return spec


@pytest.mark.more
@pytest.mark.parametrize("sizes", [(), (63, 252)], ids=["packed", "graph"])
def test_gemma_4_stays_on_its_device(
    gemma4: Gemma4Spec, gpu: Launches, sizes: tuple[int, ...]
) -> None:
    """Two sizes of heads, layers without caches, embeddings by layer, a soft cap; the tower."""
    net = blank(gemma4, torch.bfloat16)
    logits = forward(net, torch.bfloat16, [1, 7, 6])
    assert logits.device == CUDA and logits.dtype == torch.float32
    assert gpu.count
    like = torch.empty(0, dtype=torch.bfloat16, device=CUDA)
    positions = PositionCache(gemma4, net.vision, Metrics())
    config = EncoderConfig("triton", sizes)
    graphs = CapturedPacks(net, config, like, capture=eager) if sizes else None
    encoder = PackedEncoder(net, positions, config, like, graphs)
    pictures = [
        torch.empty((48 * h, 48 * w, 3), dtype=torch.uint8, device=CUDA)
        for h, w in ((2, 3), (3, 3))
    ]
    shown = [gemma4.images.grid(each.shape[0], each.shape[1]) for each in pictures]
    for rows, tokens in zip(encoder.encode(pictures, shown), (6, 9), strict=True):
        assert rows.shape == (tokens, gemma4.embedding_width) and rows.device == CUDA


def forward(net: FamilyNet, dtype: torch.dtype, lengths: Sequence[int]) -> torch.Tensor:
    """Logits of two of the rows of so many tokens, one of which is an image's."""
    spec = net.spec
    kept = spec.kv_spec()

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    total, count = sum(lengths), len(lengths)
    embeddings = torch.empty((1, spec.embedding_width), dtype=dtype, device=CUDA)
    batch = Batch(
        tokens=integers(total),
        positions=integers(3, total),
        out_slots=integers(total),
        slots=integers(count),
        page_table=integers(4, 16, dtype=torch.int32),
        q_starts=integers(count + 1, dtype=torch.int32),
        kv_lengths=integers(count, dtype=torch.int32),
        singles=lengths.count(1),
        splice_rows=integers(1),
        embeddings=embeddings,
        sample_rows=integers(2),
    )
    caches = {
        at: tuple(torch.empty((64, *each.shape), dtype=dtype, device=CUDA) for each in layer)
        for at, layer in enumerate(kept.layers)
        if layer
    }
    attention = attention_for(caches, 16, kept=kept)  # type: ignore[arg-type]
    attention.plan(batch)
    states = net.forward(batch, attention)
    return net.logits(states.index_select(0, batch.sample_rows))


class Operators(TorchDispatchMode):
    """Counts the operators that launch something: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        returned = [each.alias_info for each in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        quiet = func._schema.name.startswith(("aten::empty", "prim::"))
        self.count += not (quiet or views)
        return func(*args, **(kwargs or {}))


@pytest.mark.sparse
@pytest.mark.parametrize(
    ("batch", "kind"), [(1, Blank), (64, Blank), (256, Blank), (1, BlankInt4), (256, BlankInt4)]
)
def test_a_layer_that_decodes_takes_eleven_launches_at_any_batch(
    spec: FamilySpec, gpu: Launches, batch: int, kind: type[Blank]
) -> None:
    """On a GPU the time to launch is what a small batch costs."""
    kernels, operators = layer_launches(blank(spec, torch.bfloat16, kind), gpu, batch)
    products = 4 * (kind is BlankInt4)  # of ours; else they are cuBLAS's
    # Keys that are split are merged; a sum may be no kernel.
    assert kernels - products in (4, 5, 6)
    assert kernels + operators <= 11


@pytest.mark.sparse
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_a_layer_in_eight_bits_takes_eleven_launches_too(
    spec: FamilySpec, gpu: Launches, batch: int
) -> None:
    """Norm and gate leave rows in 8 bits; those of attention are made so by one kernel more."""
    kernels, operators = layer_launches(blank(spec, torch.bfloat16, Eight), gpu, batch)
    assert kernels in ((9, 10) if batch <= MAX_UNQUANTIZED_ROWS else (5, 6, 7))
    assert kernels + operators <= 11


def layer_launches(net: Any, gpu: Launches, batch: int) -> tuple[int, int]:
    """(kernels of ours, operators) of a layer that decodes."""
    net.text.layers += net.text.layers[-1:] * 2
    counts = []
    for _ in range(2):
        gpu.count = 0
        with Operators() as operators:
            forward(net, torch.bfloat16, [1] * batch)
        counts.append((gpu.count, operators.count))
        net.text.layers.pop()  # one that stands between layers without levels of embeddings
    (kernels, operators_of), (fewer, others) = counts
    return kernels - fewer, operators_of - others


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 2560), (2560, 9728), (2560, 2544)])
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_products_are_asked_for_as_pytorch_wants_it(
    gpu: Launches, outputs: int, inputs: int, biased: bool
) -> None:
    """Fake tensors check shapes and strides of scales as the operators do."""
    x = torch.empty((MAX_UNQUANTIZED_ROWS + 5, inputs), dtype=torch.bfloat16, device=CUDA)
    matrix = eight(torch.empty((outputs, inputs), dtype=torch.bfloat16, device=CUDA))
    assert (matrix.blocks is None) == (inputs == 2544)
    bias = torch.empty(outputs, dtype=torch.bfloat16, device=CUDA) if biased else None
    y = TritonOps().fp8_linear(x, matrix, bias)
    assert y.shape == (len(x), outputs) and y.dtype == torch.bfloat16 and y.device == CUDA
    assert gpu.count == 1, "rows are made 8 bits"


def test_experts_of_other_activations_are_refused_by_name(gpu: Launches) -> None:
    shape = MoEShape(hidden=64, width=40, experts=8, top=2, act="quick_gelu")
    with pytest.raises(CheckpointError, match="a GPU support silu and gelu_tanh, not quick_gelu"):
        SparseMLP(BlankApart(torch.bfloat16), "mlp", shape, UNSHARDED)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_experts_ask_for_no_value(gpu: Launches, rows: int, act: str) -> None:
    shape = MoEShape(hidden=64, width=40, experts=8, top=2, act=act)
    layer = SparseMLP(BlankApart(torch.bfloat16), "mlp", shape, UNSHARDED)
    x = torch.empty((rows, 64), dtype=torch.bfloat16, device=CUDA)
    assert layer(x).shape == x.shape
    assert gpu.count == 5, "where rows go, their order, up, down and the sum"


@pytest.mark.parametrize(
    "asked",
    [
        [{}],
        [{"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}],
        [{}, {"temperature": 1.0, "repetition_penalty": 1.2}, {"logprobs": 3}],
        [{"min_tokens": 4, "logit_bias": ((3, 1.0),), "frequency_penalty": 1.0}],
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [[], [0], None], ids=["free", "one masked", "masked"])
def test_drawing_asks_for_no_value(
    gpu: Launches, asked: list[dict[str, object]], masked: list[int] | None
) -> None:
    vocab, count = 3000, len(asked)
    sampler = Sampler(vocab, count, (1, 2), CUDA)
    for slot, params in enumerate(asked):
        way = SamplingParams(**params)  # type: ignore[arg-type]
        sampler.open(Open(slot, (5, 6, 7), 2, (), (), way, ()))
    draws = Draws(
        range(count),
        [1] * count,
        torch.empty(count, dtype=torch.int64, device=CUDA),
        torch.empty(count, dtype=torch.float64, device=CUDA),
    )
    some = count if masked is None else len(masked)
    masks = torch.empty((some, 94), dtype=torch.int32, device=CUDA) if some else None
    logits = torch.empty((count, vocab), dtype=torch.float32, device=CUDA)
    tokens, report = sampler(logits, draws, masks, masked if some else None)
    assert tokens.device == CUDA and tokens.shape == (count,) and tokens.dtype == torch.int64
    assert (report is not None) == any("logprobs" in params for params in asked)


@pytest.mark.first
@pytest.mark.parametrize("count", [1, 64])
def test_penalties_and_biases_take_two_launches_a_step_at_any_batch(
    gpu: Launches, count: int
) -> None:
    params = SamplingParams(
        min_tokens=4, logit_bias=((3, 1.0),), frequency_penalty=1.0, repetition_penalty=1.1
    )

    def launched(asked: SamplingParams) -> int:
        sampler = Sampler(3000, count, (1, 2), CUDA)
        for slot in range(count):
            sampler.open(Open(slot, (5, 6, 7), 2, (), (), asked, ()))
        draws = Draws(
            range(count),
            [1] * count,
            torch.empty(count, dtype=torch.int64, device=CUDA),
            torch.empty(count, dtype=torch.float64, device=CUDA),
        )
        logits = torch.empty((count, 3000), dtype=torch.float32, device=CUDA)
        gpu.count = 0
        with Operators() as operators:
            sampler(logits, draws)
        return gpu.count + operators.count

    assert launched(params) - launched(SamplingParams()) == 2
