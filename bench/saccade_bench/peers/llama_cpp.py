"""llama.cpp's C interface, from the libraries that npm's `node-llama-cpp` ships ready-made.

    npm install --ignore-scripts node-llama-cpp     # in a folder of its own: NODE

Through its own C interface, since its JavaScript one prefills and decodes by sequences of its
own making and gives no logits of a batch. Owns the layout of the few structures that are passed,
as llama.cpp v0.5.0 has them (node-llama-cpp 3.22). What defaults say about a structure is checked
before anything is set in it. Knows neither Saccade nor how files are made.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "node_modules/@node-llama-cpp/linux-x64"
FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
OTHER_FTYPES = {"F16": 1, "Q6_K": 18, "IQ4_XS": 30}
"""Kinds of files that are made of others, by llama.cpp's numbers."""


class Blob(c.Structure):
    """A structure passed whole, with only its first numbers known.

    Larger than any real one: it is returned and taken through memory, where excess does no harm.
    """

    _fields_ = (("numbers", c.c_uint32 * 8), ("rest", c.c_uint64 * 60))


class CBatch(c.Structure):
    _fields_ = (
        ("count", c.c_int32),
        ("tokens", c.POINTER(c.c_int32)),
        ("embeddings", c.c_void_p),
        ("positions", c.POINTER(c.c_int32)),
        ("sequence_counts", c.POINTER(c.c_int32)),
        ("sequences", c.POINTER(c.POINTER(c.c_int32))),
        ("wanted", c.POINTER(c.c_int8)),
    )


class LlamaCpp:
    """The libraries of one `node-llama-cpp`."""

    def __init__(self, node: Path) -> None:
        self.version: str = (
            next((node / PACKAGE / "bins/linux-x64").glob("libllama.v*.so"))
            .name.removeprefix("libllama.")
            .removesuffix(".so")
        )
        where = node / PACKAGE / "bins/linux-x64"
        ggml = c.CDLL(str(next(where.glob("libggml.v*.so"))), c.RTLD_GLOBAL)
        self.library = library = c.CDLL(str(next(where.glob("libllama.v*.so"))))
        # Of its own: ggml sets AMX's tiles once a thread, and whoever else uses them ends that.
        self.thread = ThreadPoolExecutor(1)
        self._quiet = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda *_: None)
        library.llama_log_set(self._quiet, None)
        ggml.ggml_backend_load_all_from_path(str(where).encode())
        library.llama_backend_init()
        for name, result, arguments in (
            ("llama_model_default_params", Blob, ()),
            ("llama_context_default_params", Blob, ()),
            ("llama_model_quantize_default_params", Blob, ()),
            ("llama_model_quantize", c.c_uint32, (c.c_char_p, c.c_char_p, c.POINTER(Blob))),
            ("llama_model_load_from_file", c.c_void_p, (c.c_char_p, Blob)),
            ("llama_init_from_model", c.c_void_p, (c.c_void_p, Blob)),
            ("llama_set_n_threads", None, (c.c_void_p, c.c_int32, c.c_int32)),
            ("llama_get_memory", c.c_void_p, (c.c_void_p,)),
            ("llama_memory_clear", None, (c.c_void_p, c.c_bool)),
            ("llama_memory_seq_rm", c.c_bool, (c.c_void_p, c.c_int32, c.c_int32, c.c_int32)),
            ("llama_decode", c.c_int32, (c.c_void_p, CBatch)),
            ("llama_get_logits", c.POINTER(c.c_float), (c.c_void_p,)),
            ("llama_free", None, (c.c_void_p,)),
            ("llama_model_free", None, (c.c_void_p,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def kernels(self) -> str:
        """The loaded build for processors."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = {Path(line.split()[-1]).stem for line in maps if "libggml-cpu-" in line}
        return ", ".join(sorted(name.removeprefix("libggml-cpu-") for name in found))

    def quantise(self, source: Path, target: Path, kind: str, threads: int) -> None:
        params = self.library.llama_model_quantize_default_params()
        assert params.numbers[0] == 0, "another layout of llama_model_quantize_params"
        params.numbers[0], params.numbers[1] = threads, (FTYPES | OTHER_FTYPES)[kind]
        paths = str(source).encode(), str(target).encode()
        if self.library.llama_model_quantize(*paths, c.byref(params)):
            raise RuntimeError(f"llama.cpp could not make {kind} of {source.name}")


class Llama:
    """A model and a context of it. A context manager."""

    def __init__(
        self, llama: LlamaCpp, path: Path, *, vocab: int, rows: int, context: int, threads: int
    ) -> None:
        self._library: Any = llama.library
        self._thread = llama.thread
        self._vocab = vocab
        library = self._library
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        params = library.llama_context_default_params()
        defaults = tuple(params.numbers[:4])
        assert defaults == (512, 2048, 512, 1), f"another llama_context_params: {defaults}"
        params.numbers[0], params.numbers[3] = rows * context, rows
        self._context = library.llama_init_from_model(self._model, params)
        if not (self._model and self._context):
            raise RuntimeError(f"llama.cpp could not load {path.name}")
        library.llama_set_n_threads(self._context, threads, threads)
        self._memory = library.llama_get_memory(self._context)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def forget(self, start: int = 0) -> None:
        """Drop each sequence's content from position `start` on."""
        if start == 0:
            self._library.llama_memory_clear(self._memory, False)
        else:
            self._library.llama_memory_seq_rm(self._memory, -1, start, -1)

    def run(self, rows: Sequence[Sequence[int]], start: int, *, every: bool = False) -> np.ndarray:
        """Logits after the last token of each row, or after every one: float32 [N, vocab], valid
        until the next call. Row r's tokens go to sequence r, from position `start` on.
        """
        placed = [
            (token, start + i, r, every or i == len(row) - 1)
            for r, row in enumerate(rows)
            for i, token in enumerate(row)
        ]
        count = len(placed)
        ids = [(c.c_int32 * 1)(r) for _, _, r, _ in placed]
        batch = CBatch(
            count,
            (c.c_int32 * count)(*(token for token, _, _, _ in placed)),
            None,
            (c.c_int32 * count)(*(position for _, position, _, _ in placed)),
            (c.c_int32 * count)(*[1] * count),
            (c.POINTER(c.c_int32) * count)(*(c.cast(i, c.POINTER(c.c_int32)) for i in ids)),
            (c.c_int8 * count)(*(int(wanted) for _, _, _, wanted in placed)),
        )
        decode = self._thread.submit(self._library.llama_decode, self._context, batch)
        if (code := decode.result()) != 0:
            raise RuntimeError(f"llama_decode says {code}")
        shape = (sum(wanted for _, _, _, wanted in placed), self._vocab)
        return np.ctypeslib.as_array(self._library.llama_get_logits(self._context), shape)
