"""The token embedding and the head of a language model. Each rank has a part of the vocabulary."""

from __future__ import annotations

import logging

import torch
from torch.nn import functional as F

from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"

logger = logging.getLogger("saccade")


class TokenEmbedding:
    """Looks up token embeddings in a table.

    Each rank holds consecutive tokens. If the vocabulary is not divisible by the number of ranks,
    the last ranks hold fewer.
    """

    __slots__ = ("first", "part", "shard", "share", "table", "vocab_size")

    def __init__(self, weights: Weights, name: str, shape: tuple[int, int], shard: Shard) -> None:
        self.vocab_size = shape[0]
        self.share = -(-shape[0] // shard.size)
        self.first = min(shard.rank * self.share, shape[0])
        mine = slice(self.first, min(self.first + self.share, shape[0]))
        self.part = Part(name, shape, (mine,))
        self.table = weights.load(self.part)
        self.shard = shard

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of tokens [T] int64, and return them in a new tensor [T,
        hidden].
        """
        if self.shard.size == 1:
            return F.embedding(tokens, self.table)
        local = tokens - self.first
        here = (local >= 0) & (local < self.table.shape[0])
        rows = F.embedding(torch.where(here, local, 0), self.table)
        return self.shard.all_reduce(rows.masked_fill_(~here.unsqueeze(1), 0.0))


class TokenHead:
    """Computes logits by multiplying with a table, which may be the token embedding's.

    If weights are packed or quantized, the head has its own copy because the embedding needs plain
    rows. This trades memory for time: multiplying takes half the time (decision 003).
    """

    __slots__ = ("ops", "shard", "share", "vocab_size", "weight")

    def __init__(self, weights: Weights, rows: TokenEmbedding) -> None:
        self.vocab_size = rows.vocab_size
        self.share = rows.share
        self.shard = rows.shard
        # this rank's rows: [share, hidden]
        self.ops = weights.ops
        self.weight = weights.matrix(rows.table, rows.part.name).ready(self.ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] -> [R, vocab_size] on every rank. With 8-bit weights the result is
        float32.
        """
        logits = self.weight.logits(self.ops, x)
        if self.shard.size == 1:
            return logits
        padded = F.pad(logits, (0, self.share - logits.shape[1]))
        everyones = self.shard.all_gather(padded)  # [size, R, share]
        return everyones.transpose(0, 1).reshape(x.shape[0], -1)[:, : self.vocab_size]


def make_head(weights: Weights, embedding: TokenEmbedding, *, tied: bool) -> TokenHead:
    """Build the LM head. If `tied`, it shares the table of `embedding`.

    As in transformers 5, a head that the checkpoint stores is used even if `tied`, unless its
    values equal the table. Each rank compares its own rows. Ranks may decide differently, because
    sharing equal rows does not change logits.
    """
    shape = embedding.vocab_size, embedding.table.shape[1]
    if tied and weights.has(HEAD):
        part = Part(HEAD, shape, embedding.part.index)
        tied = weights.equals(part, embedding.table)
        if not tied:
            logger.warning(
                "the checkpoint's %s differs from its token embedding: using it, although "
                "config.json sets tie_word_embeddings",
                HEAD,
            )
    if not tied:
        embedding = TokenEmbedding(weights, HEAD, shape, embedding.shard)
    return TokenHead(weights, embedding)
