"""DeepSeekMoE's router: each row's experts, and how much each counts."""

from __future__ import annotations

import torch

from saccade.families.deepseek_vl2.config import Routing
from saccade.kernels.reference.moe import Routes


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routes:
    """Pick experts and shares for router logits [T, E].

    bias: added to scores only where experts are chosen.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    chosen = scores if bias is None else scores + bias
    if routing.method != "greedy" and routing.groups > 1:
        chosen = _within_groups(chosen, routing)
    experts = chosen.topk(routing.top, dim=-1).indices
    shares = scores.gather(1, experts)
    if routing.normalised and routing.top > 1:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return Routes(experts, (shares * routing.factor).to(logits.dtype))


def _within_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the scores [T, E] with 0 outside each row's best groups."""
    groups = scores.view(len(scores), routing.groups, -1)
    best = groups.topk(2 if routing.method == "noaux_tc" else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(routing.top_groups, dim=-1).indices, value=True)
    found: torch.Tensor = groups.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
    return found
