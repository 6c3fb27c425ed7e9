"""The two ends of a language model, cut among ranks by vocabulary: tokens to rows, rows to
logits.
"""

from __future__ import annotations

import logging

import torch
from torch.nn import functional as F

from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard

HEAD = "lm_head.weight"

logger = logging.getLogger("saccade")


class TokenEmbedding:
    """A row per token.

    A rank holds consecutive tokens. Where the vocabulary does not divide evenly, the last ranks
    hold fewer.
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
        """Look up [T] int64 -> [T, hidden], owned."""
        if self.shard.size == 1:
            return F.embedding(tokens, self.table)
        local = tokens - self.first
        here = (local >= 0) & (local < self.table.shape[0])
        rows = F.embedding(torch.where(here, local, 0), self.table)
        return self.shard.all_reduce(rows.masked_fill_(~here.unsqueeze(1), 0.0))


class TokenHead:
    """Logits: products with every row in an embedding's table.

    The table may also be the token embedding's own. Where weights are packed or in 8 bits, the head
    has a copy in that form, for the embedding reads single rows. That trades memory for time: the
    products take half the time (decision 003).
    """

    __slots__ = ("ops", "shard", "share", "vocab_size", "weight")

    def __init__(self, weights: Weights, rows: TokenEmbedding) -> None:
        self.vocab_size = rows.vocab_size
        self.share = rows.share
        self.shard = rows.shard
        # this rank's rows [share, hidden]
        self.ops = weights.ops
        self.weight = weights.matrix(rows.table, rows.part.name).ready(self.ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] -> [R, vocab_size] on every rank.

        From 8 bits, the logits are in float32.
        """
        logits = self.weight.logits(self.ops, x)
        if self.shard.size == 1:
            return logits
        padded = F.pad(logits, (0, self.share - logits.shape[1]))
        everyones = self.shard.all_gather(padded)  # [size, R, share]
        return everyones.transpose(0, 1).reshape(x.shape[0], -1)[:, : self.vocab_size]


def make_head(weights: Weights, embedding: TokenEmbedding, *, tied: bool) -> TokenHead:
    """Make the head behind `embedding`, whose table it shares if `tied`.

    A stored head with other values is used even if `tied`, as in transformers 5. Each rank compares
    its own rows: sharing equal ones changes no logits.
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
