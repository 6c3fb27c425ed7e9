"""Files that are cut off, damaged, of another model or hostile: an error names the file and says
what to do, before memory is taken for what the file claims.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from saccade.core.errors import CheckpointError, ConfigError
from saccade.families.registry import resolve_checkpoint
from saccade.plugins.gguf import header
from saccade.plugins.gguf.config import make_configs
from saccade.plugins.gguf.folder import choose, write_folder
from saccade.plugins.gguf.header import read_header
from saccade.plugins.gguf.tensors import open_gguf
from tests.families.forwarding import load
from tests.fixtures.gguf_files import Files, write_files

HUGE = 10**9
ROOM = 256 << 20
"""Bytes that a header may take in all these tests."""


@pytest.fixture(scope="module")
def files(gguf_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(gguf_checkpoint("qwen3_vl"), tmp_path_factory.mktemp("good"), Kind.Q8_0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def bounded() -> Iterator[None]:
    """Whatever takes more memory than this fails."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(tensors: int, fields: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, start)


def array(name: str, kind: int, count: int) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count)


BAD = {
    "empty": (b"", "not a GGUF file"),
    "other magic": (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
    "version 1": (head(0, 0, version=1), "GGUF version 1"),
    "only magic": (b"GGUF", "the file is truncated"),
    "many tensors": (head(HUGE, 0), f"{HUGE} tensors; the limit is 65536"),
    "tensors without room": (head(60_000, 0), "60000 tensors do not fit into it"),
    "many fields": (head(0, HUGE), f"{HUGE} metadata fields; the limit is 4096"),
    "long text": (head(0, 1, struct.pack("<Q", 1 << 60) + bytes(8)), "a string has"),
    "long array": (head(0, 1, array("a", 4, HUGE)), f"{HUGE} values of a; the limit is"),
    "array without room": (head(0, 1, array("a", 8, 1 << 20)), "values of a do not fit"),
    "array of arrays": (head(0, 1, array("a", 9, 1)), "an array of type 9"),
    "unknown kind": (head(0, 1, text("a") + struct.pack("<I", 77)), "a has the unknown type 77"),
    "no text": (head(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8)), "not UTF-8"),
    "no dimensions": (head(1, 0, text("t") + bytes(24)), "0 dimensions"),
    "many dimensions": (head(1, 0, tensor("t", (1,) * 9)), "9 dimensions"),
    "unknown format": (head(1, 0, tensor("t", (32,), 999)), "format 999.*upgrade that package"),
    "no values": (head(1, 0, tensor("t", (0, 4))), r"tensor t is \[4, 0\]"),
    "overflow": (head(1, 0, tensor("t", (1 << 63, 1 << 63))), "tensor t is"),
    "half a block": (head(1, 0, tensor("t", (33,), 8)), "not a possible shape for format Q8_0"),
    "outside": (head(1, 0, tensor("t", (32,), 0, 1 << 62)), "tensor t ends at byte"),
    "cut values": (head(1, 0, tensor("t", (1 << 30,))), "download it again"),
    "twice": (head(2, 0, tensor("t", (1,)) * 2 + bytes(64)), "two tensors have the same name"),
    "alignment": (
        head(0, 1, text("general.alignment") + struct.pack("<II", 4, 12)),
        "must be a power of two",
    ),
}


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_refused_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as refused:
        read_header(path)
    assert str(path) in str(refused.value)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("texts", [False, True])
def test_many_arrays_take_no_more_memory_than_one(tmp_path: Path, *, texts: bool) -> None:
    """Each within its own bound; what they hold is a hole in the file, so nobody paid for it."""
    path, arrays = tmp_path / "hole.gguf", 20 if texts else 40
    with path.open("wb") as file:
        file.write(head(0, arrays))
        for at in range(arrays):
            if texts:
                file.write(text(f"a{at}") + struct.pack("<IQ", 8, header.MAX_TEXT))
                file.seek(header.MAX_TEXT, 1)
            else:
                file.write(array(f"a{at}", 0, header.MAX_ITEMS))
                file.seek(header.MAX_ITEMS, 1)
        file.write(bytes(8))
    assert path.stat().st_blocks * 512 < path.stat().st_size / 50
    words = (
        "its strings have" if texts else f"its arrays up to a1 have {2 * header.MAX_ITEMS} values"
    )
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


@pytest.mark.usefixtures("bounded")
def test_a_file_cut_anywhere_is_refused(files: Files, tmp_path: Path) -> None:
    whole = files.model.read_bytes()
    path = tmp_path / "cut.gguf"
    for at in (*range(5, 3000, 37), *range(3000, len(whole), 4001)):
        path.write_bytes(whole[:at])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            read_header(path)


def test_an_opened_file_is_read_again_only_if_it_has_changed(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(files.model.read_bytes())
    assert open_gguf(path) is open_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_gguf(path)


def test_a_tensor_that_a_layer_misses_is_named(files: Files, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(
        files.model.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight")
    )
    folder = write_folder([model], files.mmproj)
    with pytest.raises(CheckpointError, match=r"language_model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def changed(path: Path, tensors: bool = True, **fields: Any) -> header.GgufFile:
    file = read_header(path)
    metadata = {**file.metadata, **{name.replace("__", "."): each for name, each in fields.items()}}
    return replace(file, metadata=metadata, tensors=file.tensors if tensors else {})


def test_files_that_do_not_belong_together_are_refused(
    files: Files, gguf_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    second = write_files(gguf_checkpoint("qwen2_5_vl"), tmp_path, Kind.F32)
    with pytest.raises(CheckpointError, match=r"type qwen2\.5vl_merger.*not belong to qwen3vl"):
        write_folder([files.model], second.mmproj)
    with pytest.raises(CheckpointError, match=r"has no vision encoder"):
        write_folder([files.model], second.model)
    with pytest.raises(CheckpointError, match=r"it is a vision encoder: pass the language model's"):
        write_folder([files.mmproj], files.mmproj)
    with pytest.raises(CheckpointError, match=r"for the vision encoder: pass it as --mmproj"):
        write_folder([files.model], None)
    narrow = changed(files.model, qwen3vl__embedding_length=128)
    names = set(narrow.tensors)
    with pytest.raises(CheckpointError, match="64 values, but the language model expects 128"):
        make_configs(narrow, read_header(files.mmproj), names)
    flat = changed(files.model, qwen3vl__n_deepstack_layers=3)
    with pytest.raises(CheckpointError, match=r"2 extra levels .* model\.gguf .* expects 3"):
        make_configs(flat, read_header(files.mmproj), names)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_5_moe"])
def test_a_tower_with_levels_that_the_model_does_not_take_is_refused(
    files: Files, gguf_checkpoint: Callable[..., Path], tmp_path: Path, model: str
) -> None:
    hybrid = write_files(gguf_checkpoint(model), tmp_path, Kind.F32)
    with pytest.raises(CheckpointError, match=r"2 extra levels .* expects 0: pass the --mmproj"):
        write_folder([hybrid.model], files.mmproj)
    with pytest.raises(CheckpointError, match=r"0 extra levels .* expects 2: pass the --mmproj"):
        write_folder([files.model], hybrid.mmproj)
    assert write_folder([hybrid.model], hybrid.mmproj)
    # Some converters list the levels of a tower that has none.
    listed = changed(hybrid.mmproj, clip__vision__is_deepstack_layers=[True, True])
    header, names = read_header(hybrid.model), set(read_header(hybrid.model).tensors)
    assert make_configs(header, listed, names)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_vl"])
def test_a_file_of_another_model_is_no_part_of_one(
    files: Files, gguf_checkpoint: Callable[..., Path], tmp_path: Path, model: str
) -> None:
    first = write_files(gguf_checkpoint(model), tmp_path, Kind.F32)
    for tower in (None, first.mmproj):
        with pytest.raises(CheckpointError, match=r"clip, and does not belong to model\.gguf"):
            write_folder([first.model, first.mmproj], tower)
    other = write_files(gguf_checkpoint("qwen2_vl"), tmp_path / "other", Kind.F32)
    with pytest.raises(CheckpointError, match="contains qwen2vl, and does not belong to"):
        write_folder([first.model, other.model], first.mmproj)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"general__architecture": "rwkv7"},
            r"rwkv7 is not supported \(supported: .*llama.*\); try .* folder",
        ),
        ({"general__architecture": 5}, "general.architecture is missing"),
        ({"qwen3vl__block_count": "x"}, "qwen3vl.block_count is 'x'"),
        ({"qwen3vl__embedding_length": None}, "qwen3vl.embedding_length is missing"),
        ({"qwen3vl__attention__head_count": [4, 5]}, r"must be a whole number, not \[4, 5\]"),
        ({"qwen3vl__rope__dimension_sections": [1]}, "must be a list of 3 numbers"),
        ({"tokenizer__ggml__tokens": ["a"]}, "no <|image_pad|>"),
    ],
)
def test_metadata_that_make_no_model_are_named(
    files: Files, fields: dict[str, Any], words: str
) -> None:
    model = changed(files.model, **fields)
    with pytest.raises(CheckpointError, match=words.replace("|", r"\|")):
        make_configs(model, read_header(files.mmproj), set(model.tensors))


def test_parts_that_are_missing_are_named(files: Files, tmp_path: Path) -> None:
    bare = changed(files.mmproj, tensors=False)
    with pytest.raises(CheckpointError, match=r"no tensor mm\.2\.weight"):
        make_configs(read_header(files.model), bare, set())
    part = tmp_path / "model-00001-of-00002.gguf"
    part.write_bytes(files.model.read_bytes())
    with pytest.raises(CheckpointError, match=r"other parts are missing: model-00002-of-00002"):
        resolve_checkpoint(str(part))


def test_without_the_package_the_extra_is_named(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(ConfigError, match=r"scripts/install\.py .*'\.\[gguf\]'"):
        read_header(files.model)


NAMES = (
    *("A-Q4_K_M.gguf", "A-Q4_K_S.gguf", "A-Q8_0-00001-of-00002.gguf", "mmproj-A-F16.gguf"),
    *("A-Q8_0-00002-of-00002.gguf", "mmproj-A-BF16.gguf"),
)


def test_a_file_is_chosen_by_its_name_or_what_tells_it_from_others() -> None:
    assert choose(NAMES, "Q4_K_M", "x") == "A-Q4_K_M.gguf"
    assert choose(NAMES, "q4_k_s", "x") == "A-Q4_K_S.gguf"
    assert choose(NAMES, "Q8_0", "x") == "A-Q8_0-00001-of-00002.gguf"
    assert choose(NAMES, "A-Q4_K_M.gguf", "x") == "A-Q4_K_M.gguf"
    assert choose(NAMES[3:4] + NAMES[:1], None, "x") == "A-Q4_K_M.gguf"
    for wanted in ("Q4_K", "Q2_K", None):
        with pytest.raises(
            CheckpointError, match=r"select one, as in x:A-Q4_K_M\.gguf \(there are: A-Q4_K_M"
        ):
            choose(NAMES, wanted, "x")


def test_options_that_name_no_file_are_refused(
    files: Files, gguf_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="--mmproj nothing: there is no such file"):
        resolve_checkpoint(str(files.model), tower_file="nothing")
    with pytest.raises(CheckpointError, match="is a file: omit"):
        resolve_checkpoint(f"{files.model}:Q8_0")
    with pytest.raises(CheckpointError, match=r"absent\.gguf: there is no such file"):
        resolve_checkpoint(str(tmp_path / "absent.gguf"))
    with pytest.raises(CheckpointError, match=r"has no \*\.gguf file"):
        resolve_checkpoint(f"{gguf_checkpoint('qwen3_vl')}:Q8_0")


def test_a_folder_and_a_file_beside_its_tower_are_enough(
    files: Files, link: Callable[..., Path]
) -> None:
    folder = link(files)
    whole = resolve_checkpoint(str(folder))
    assert resolve_checkpoint(str(folder / "tiny-Q8_0.gguf")) == whole
    assert resolve_checkpoint(f"{folder}:Q8_0") == whole
    assert resolve_checkpoint(f"{folder}:tiny-Q8_0.gguf") == whole


def test_a_folder_with_a_colon_in_its_name_is_a_folder(
    files: Files, link: Callable[..., Path]
) -> None:
    folder = link(files)
    named = folder.rename(folder.with_name("both:Q8_0"))
    found = resolve_checkpoint(str(named))
    assert found == resolve_checkpoint(f"{named}:Q8_0")


@pytest.fixture
def link(tmp_path: Path) -> Callable[..., Path]:
    def links(files: Files) -> Path:
        folder = tmp_path / "both"
        folder.mkdir()
        (folder / "tiny-Q8_0.gguf").symlink_to(files.model)
        (folder / "mmproj-tiny-F16.gguf").symlink_to(files.mmproj)
        return folder

    return links


def test_of_a_hub_repository_the_chosen_file_and_the_tower_are_fetched(
    files: Files, link: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = link(files)
    wanted: list[tuple[str | None, list[str]]] = []

    def fetched(_repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        wanted.append((revision, allow_patterns))
        return str(folder)

    names = ["README.md", "tiny-Q8_0.gguf", "tiny-Q4_0.gguf", "mmproj-tiny-F16.gguf"]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    found = resolve_checkpoint("someone/tiny-GGUF:Q8_0", "main")
    assert found == resolve_checkpoint(str(folder))
    assert wanted == [("main", ["tiny-Q8_0.gguf", "mmproj-tiny-F16.gguf"])]
    with pytest.raises(CheckpointError, match=r"someone/tiny-GGUF: several of its \*\.gguf files"):
        resolve_checkpoint("someone/tiny-GGUF")
    with pytest.raises(CheckpointError, match="there is no directory"):
        resolve_checkpoint("./a/tiny-GGUF")
