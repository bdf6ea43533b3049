"""What a KV head loses under a budget: the errors that head profiles are made of.

For a KV head g, a rule and a budget B, over the last queries q of a text:

    error[g, B, q] = |W_g (a[q] * (o_B[q] - o[q]))|^2

with o the output of the head's query heads, o_B the same over what the rule keeps of
the past with B slots (`Rule`) beside the sink of the softmax, if it has one
(policy/softmax.py), which stays,
a what a gate multiplies the output by where a model has one (Qwen3-Next; else 1), and
W_g the head's part of the output projection.

A profile has them over the squared norm of the residual stream after the layer, which
they are errors of. Some models (Gemma, OLMo 2) normalize what attention puts out before
they add it to the stream: its own size then says nothing, and a profile has the errors
over its squared norm. Where the projection is not known, they are changes of the
heads' outputs, over the squared norm of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_h2o.policy.methods.base import max_pool
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.softmax import attention_and_sink

GRID_SHARES = (
    0.00625, 0.0125, 0.025, 0.0375, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8,
)  # fmt: skip
"""Budgets of the grid, as shares of the context."""
OBSERVED = 128
"""Last queries of a text, whose outputs are compared."""
STRIDE = 8
"""One earlier query in so many scores: more would change nothing that shows."""
WINDOW, POOLING = 32, PRESETS["h2o"].pooling
"""Of `LAST`."""
SINKS = PRESETS["h2o"].sinks
_LEAST_SEEN = 1e-30
"""Of a query's attention, that what is kept has: less of it says nothing."""


class Paid(NamedTuple):
    """Attention of queries of one KV head before the observed ones.

    Attributes:
        past: `[group, queries, n]` of the queries 0, `STRIDE`, ..
        last: `[group, WINDOW, n]` of the last ones.
    """

    past: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Rule:
    """What a KV head keeps of the past.

    Attributes:
        score: Of a KV head by its index and what its queries paid: `[>= past]`, the
            higher the better to keep.
        recent: Share of the budget for the most recent tokens.
        sinks: First tokens that are kept anyway.
    """

    score: Callable[[int, Paid], torch.Tensor]
    recent: float = PRESETS["h2o"].recent_ratio
    sinks: int = SINKS

    def kept(self, head: int, paid: Paid, grid: Sequence[int]) -> list[torch.Tensor]:
        """For each budget the positions that the observed queries may see.

        The observed ones are all among them.
        """
        n = paid.past.shape[2]
        past = n - OBSERVED
        positions = torch.arange(n, device=paid.past.device)
        score = self.score(head, paid).clone()
        score[: self.sinks] = float("inf")
        kept = []
        for budget in grid:
            start = past - min(int(budget * self.recent), past)
            heavy = score[:start].topk(min(budget - (past - start), start)).indices
            kept.append(torch.cat([heavy, positions[start:]]))
        return kept


def _mean_of_past(head: int, paid: Paid) -> torch.Tensor:
    _, queries, n = paid.past.shape
    positions = torch.arange(n, device=paid.past.device)
    # Of the queries 0, STRIDE, ... those at or after a position.
    could_see = queries - (positions + STRIDE - 1) // STRIDE
    return paid.past.sum(dim=(0, 1)) / could_see.clamp(min=1)


def _mean_of_last(head: int, paid: Paid) -> torch.Tensor:
    n = paid.last.shape[2]
    past = n - OBSERVED
    positions = torch.arange(past, device=paid.last.device)
    could_see = past - positions.clamp(min=past - WINDOW)
    score = paid.last[..., :past].sum(dim=(0, 1)) / could_see
    return max_pool(score[None], POOLING)[0]


PAST = Rule(_mean_of_past, recent=0.5)
"""By the attention of all earlier queries: a plain H2O. Head profiles are of it, since
what counts for them is how heads compare."""
LAST = Rule(_mean_of_last)
"""What the preset `h2o` keeps of a prompt by attention."""


def grid_of(context_tokens: int) -> list[int]:
    """Budgets that are measured on texts of `context_tokens`, in tokens."""
    return sorted({max(2 * SINKS, round(x * context_tokens)) for x in GRID_SHARES})


def head_errors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gram: torch.Tensor,
    scale: float,
    softcap: float,
    grid: Sequence[int],
    rules: Sequence[Rule] = (PAST,),
    note: Callable[[torch.Tensor], None] | None = None,
    gate: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The errors of every KV head of one layer on one text.

    Args:
        query: `[n, num_heads, head_size]` float32, after RoPE; n above `OBSERVED`.
        key: `[n, num_kv_heads, head_size]` float32, after RoPE.
        value: `[n, num_kv_heads, head_size_v]` float32.
        gram: `[num_kv_heads, width, width]` float32 `W_g^T W_g`, with width the
            query heads of a KV head times head_size_v.
        scale: Of the softmax.
        softcap: Of the logits, 0.0 for none.
        grid: Budgets in tokens.
        rules: What is kept.
        note: Is told the attention of the queries 0, `STRIDE`, .. before the observed
            ones, `[group, queries, n]`, for one KV head after the other.
        gate: `[OBSERVED, num_heads, head_size_v]` float32, what the outputs of the
            observed queries are multiplied by; None: nothing.
        sink_logits: `[num_heads]` float32 of the sinks (`policy.softmax`), which take
            of what is left as they do of all; None: there are none.

    Returns:
        `[len(rules), num_kv_heads, len(grid), OBSERVED]` float32.
    """
    group = query.shape[1] // key.shape[1]
    errors = []
    # A KV head at a time bounds the memory.
    for head in range(key.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        sink = None if sink_logits is None else sink_logits[heads]
        paid, observed, of_sink = _probabilities(
            query[:, heads], key[:, head], scale, softcap, sink
        )
        if note is not None:
            note(paid.past)
        full = observed @ value[:, head]
        for kept in (x for rule in rules for x in rule.kept(head, paid, grid)):
            part = observed[..., kept]
            # Of a head that looks at one token alone, others get nothing in float32.
            seen = part.sum(dim=-1, keepdim=True) + of_sink
            output = (part / seen.clamp(min=_LEAST_SEEN)) @ value[kept, head]
            change = (output - full).transpose(0, 1)
            if gate is not None:
                change = change * gate[:, heads]
            change = change.flatten(1)
            errors.append(((change @ gram[head]) * change).sum(dim=-1))
    shape = (key.shape[1], len(rules), len(grid), OBSERVED)
    return torch.stack(errors).view(shape).transpose(0, 1).clamp(min=0.0)


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    softcap: float,
    sink: torch.Tensor | None,
) -> tuple[Paid, torch.Tensor, torch.Tensor]:
    """Attention of the queries before the observed ones, and of these.

    Args:
        query: `[n, group, head_size]`.
        key: `[n, head_size]`.
        sink: `[group]` logits, or None.

    Returns:
        That, and `[group, OBSERVED, n]`; what of the latter's the sink takes,
        `[group, OBSERVED, 1]`, or 0.
    """
    n = len(key)
    positions = torch.arange(n, device=key.device)
    past = n - OBSERVED
    rows = torch.cat([positions[:past:STRIDE], positions[past - WINDOW :]])
    logits = query[rows].transpose(0, 1) @ key.T * scale
    hidden = positions > rows[:, None]
    sink = None if sink is None else sink[:, None]
    probabilities, of_sink = attention_and_sink(
        logits, hidden, softcap=softcap, sink=sink
    )
    strided = len(rows) - WINDOW - OBSERVED
    before, last, observed = probabilities.split([strided, WINDOW, OBSERVED], dim=1)
    of_sink = of_sink if sink is None else of_sink[:, -OBSERVED:]
    return Paid(before, last), observed, of_sink
