"""Compare Saccade's tokenizers for GGUF files with reference libraries, on real text.

    python -m saccade_bench.peers.vocabularies SOURCE [--lines 1000]

Needs tiktoken, sentencepiece, protobuf and mistral-common.

SOURCE is llama.cpp's source folder, which has vocabularies of published models (see `llama_convert`
for where to get it). Pixtral's is from mistral-common. The text is from translations of Debian's
programs in thirteen scripts (`/usr/share/locale`). Saccade creates its tokenizer from the file as a
server would. The reference is tiktoken, SentencePiece, mistral-common, or the algorithm of GPT-2's
encoder, with the file's tokens and the publisher's pre-tokenization rules. Tokens must also decode
to the original text.
"""

from __future__ import annotations

import argparse
import base64
import gettext
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import mistral_common
import regex
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, pre_tokenizers

from saccade.plugins.gguf.header import GgufFile, read_header
from saccade.plugins.gguf.known import gguf_facts
from saccade.plugins.gguf.tokenizer import make_tokenizer
from saccade_bench.fixtures.real_model import fetch

SCRIPTS = {
    "Latin": "fr",
    "Cyrillic": "ru",
    "Greek": "el",
    "Arabic": "ar",
    "Hebrew": "he",
    "Devanagari": "hi",
    "Bengali": "bn",
    "Tamil": "ta",
    "Thai": "th",
    "Georgian": "ka",
    "Han": "zh_CN",
    "Kana": "ja",
    "Hangul": "ko",
}
"""A language for each script."""
LOCALES = Path("/usr/share/locale")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
UNKNOWN, CONTROL = 2, 3
Encode = Callable[[str], list[int]]


def texts(lines: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (script, lines). The lines only depend on the installed packages."""
    for script, language in SCRIPTS.items():
        found = set[str]()
        for path in sorted((LOCALES / language / "LC_MESSAGES").glob("*.mo")):
            with path.open("rb") as opened:
                said = gettext.GNUTranslations(opened)
            for key, value in vars(said)["_catalog"].items():
                if key:
                    found.update(line for line in value.split("\n") if line.strip())
        ordered = sorted(found)
        yield script, ordered[:: max(1, len(ordered) // lines)][:lines]


def by_bytes(file: GgufFile, pattern: str, *, compose: bool = False) -> Encode:
    """Return tiktoken's encoder with the file's merges. `compose`: apply NFC first."""
    tokens, merges = (file.metadata[f"tokenizer.ggml.{each}"] for each in ("tokens", "merges"))
    alphabet = {letter: bytes([byte]) for byte, letter in enumerate(letters())}
    ranks = {byte: at for at, byte in enumerate(alphabet.values())}
    for at, merge in enumerate(merges):
        joined = merge.replace(" ", "")
        ranks.setdefault(b"".join(alphabet[each] for each in joined), 256 + at)
    made = tiktoken.Encoding("made", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ids = {
        b"".join(alphabet[each] for each in token): at
        for at, token in enumerate(tokens)
        if alphabet.keys() >= set(token)
    }

    def encode(text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if compose else text
        found = made.encode_ordinary(text)
        return [ids[made.decode_single_token_bytes(each)] for each in found]

    return encode


def by_pairs(file: GgufFile, *, digits: bool = False) -> Encode:
    """Return GPT-2's algorithm, which only uses listed merges. `digits`: split off each digit."""
    tokens, merges = (file.metadata[f"tokenizer.ggml.{each}"] for each in ("tokens", "merges"))
    ranks = {tuple(merge.split(" ")): at for at, merge in enumerate(merges)}
    ids = {token: at for at, token in enumerate(tokens)}
    written = letters()

    @cache
    def joined(piece: str) -> list[int]:
        parts = [written[byte] for byte in piece.encode()]
        while True:
            best = min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)), default=None)
            if best is None or best not in ranks:
                return [ids[part] for part in parts]
            at, found = 0, list[str]()
            while at < len(parts):
                both = tuple(parts[at : at + 2]) == best
                found.append("".join(parts[at : at + 1 + both]))
                at += 1 + both
            parts = found

    def encode(text: str) -> list[int]:
        cut = regex.split(r"(\p{N})", text) if digits else [text]
        return [
            each for part in cut for piece in regex.findall(GPT2, part) for each in joined(piece)
        ]

    return encode


def letters() -> list[str]:
    """Return the character that GPT-2 uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    shown = {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert set(shown.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [shown[byte] for byte in range(256)]


def by_score(file: GgufFile, *, listed: bool = False) -> Encode:
    """Return SentencePiece's encoder with the file's scores, or its order of merges if `listed`."""
    names = ("tokens", "scores", "token_type")
    tokens, scores, types = (file.metadata[f"tokenizer.ggml.{each}"] for each in names)
    if listed:
        order: dict[str, int] = {}
        for at, merge in enumerate(file.metadata["tokenizer.ggml.merges"]):
            order.setdefault(merge.replace(" ", "", 1), at)
        scores = [-float(order.get(token, len(order))) for token in tokens]
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types):
        known = CONTROL if kind == UNKNOWN and token != "<unk>" else kind
        proto.pieces.add(piece=token, score=score, type=known)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    spaced = file.metadata.get("tokenizer.ggml.add_space_prefix") is not False
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = spaced
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    made = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return lambda text: list(made.encode(text))


TEKKEN = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
"""The file with Pixtral's vocabulary."""


def tekken_file(pre: str) -> GgufFile:
    """Return Pixtral's vocabulary in the form that llama.cpp's converter writes."""
    data = json.loads(TEKKEN.read_text())
    special = data["config"]["default_num_special_tokens"]
    count = data["config"]["default_vocab_size"] - special
    words = [base64.b64decode(each["token_bytes"]) for each in data["vocab"][:count]]
    ranks, written = {word: at for at, word in enumerate(words)}, letters()
    shown = ["".join(written[byte] for byte in word) for word in words]
    merges = []
    for word, both in zip(words[256:], shown[256:]):
        cuts = [at for at in range(1, len(word)) if {word[:at], word[at:]} <= ranks.keys()]
        cuts.sort(key=lambda at: (ranks[word[:at]], ranks[word[at:]]))
        merges += [f"{both[:at]} {both[at:]}" for at in cuts]
    named = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [f"<SPECIAL_{at}>" for at in range(special)] + shown,
        "token_type": [CONTROL] * special + [1] * count,
        "merges": merges,
        "bos_token_id": 1,
    }
    return GgufFile(TEKKEN, {f"tokenizer.ggml.{name}": each for name, each in named.items()}, {})


def by_tekken(_file: GgufFile) -> Encode:
    """Return the encoder of Mistral's own library."""
    made = Tekkenizer.from_file(TEKKEN)
    return lambda text: list(made.encode(text, bos=False, eos=False))


REFERENCES: dict[str, tuple[str, Callable[[GgufFile], Encode]]] = {
    "llama-bpe": ("tiktoken", lambda file: by_bytes(file, LLAMA3)),
    "qwen2": ("tiktoken", lambda file: by_bytes(file, QWEN2, compose=True)),
    "qwen35": ("tiktoken", lambda file: by_bytes(file, QWEN35, compose=True)),
    "tekken": ("mistral-common", by_tekken),
    "pixtral": ("tiktoken", lambda file: by_bytes(file, LLAMA3)),
    "gpt-2": ("GPT-2's algorithm", by_pairs),
    "starcoder": ("GPT-2's algorithm", lambda file: by_pairs(file, digits=True)),
    "refact": ("GPT-2's algorithm", lambda file: by_pairs(file, digits=True)),
    "smollm": ("GPT-2's algorithm", lambda file: by_pairs(file, digits=True)),
    "llama-spm": ("sentencepiece", by_score),
    "phi-3": ("sentencepiece", by_score),
    "gemma-4": ("sentencepiece", lambda file: by_score(file, listed=True)),
}


def vocabulary(source: Path, name: str) -> GgufFile | None:
    """Return a vocabulary's file, or None if it is not available."""
    if name in ("tekken", "pixtral"):
        return tekken_file(name)
    path = fetch() if name == "smollm" else source / f"models/ggml-vocab-{name}.gguf"
    return None if path is None else read_header(path)


def compare(file: GgufFile, name: str, read: Sequence[tuple[str, list[str]]]) -> int:
    """Print a row of the table, and return the number of lines that differ.

    Lines with a special token ("<filename>") are skipped, because libraries treat it as text.
    """
    library, make = REFERENCES[name]
    theirs = make(file)
    kind = gguf_facts().texts.get(file.architecture)
    made = make_tokenizer(file, kind.keep_space if kind else None)
    special = {each["id"] for each in made["added_tokens"] if each["special"]}
    ours = Tokenizer.from_str(json.dumps(made))
    count, differ, lost, shown = 0, 0, 0, list[str]()
    for script, lines in read:
        for line in lines:
            mine = ours.encode(line, add_special_tokens=False).ids
            if special & set(mine):
                continue
            count += 1
            if mine != theirs(line):
                differ += 1
                shown.append(f"{name}, {script}: {line!r} {mine} {theirs(line)}")
            back = ours.decode(mine, skip_special_tokens=False)
            lost += back not in (line, unicodedata.normalize("NFC", line))
    print(f"| `{name}` | {library} | {count:,} | {differ} | {lost} |")
    for each in shown[:3]:
        print(each, file=sys.stderr)
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--lines", type=int, default=1000, help="of each script")
    parser.add_argument("--only", nargs="*", default=list(REFERENCES), choices=list(REFERENCES))
    args = parser.parse_args()
    read = list(texts(args.lines))
    print("lines: " + ", ".join(f"{script} {len(lines)}" for script, lines in read))
    print("| vocabulary | beside | lines | differ | not the text again |\n|---|---|---|---|---|")
    differ = 0
    for name in args.only:
        file = vocabulary(args.source, name)
        differ += compare(file, name, read) if file is not None else 0
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
