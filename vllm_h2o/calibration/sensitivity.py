"""What a KV head loses under a budget: the errors that head profiles are made of.

For a KV head g and a budget B, over the last queries q of a text:

    error[g, B, q] = |W_g (a[q] * (o_B[q] - o[q]))|^2

with o the output of the head's query heads, o_B the same over what a plain H2O keeps
of the past with B slots (4 sinks, the highest mean probability over all earlier
queries, the recent half; not the preset's choices: what counts is how heads compare)
beside the sink of the softmax, if it has one (policy/softmax.py), which stays,
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

import torch

from vllm_h2o.policy.softmax import attention_and_sink

GRID_SHARES = (
    0.00625, 0.0125, 0.025, 0.0375, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8,
)  # fmt: skip
"""Budgets of the grid, as shares of the context."""
OBSERVED = 128
"""Last queries of a text, whose outputs are compared."""
STRIDE = 8
"""One earlier query in so many scores: more would change nothing that shows."""
SINKS = 4
_LEAST_SEEN = 1e-30
"""Of a query's attention, that what is kept has: less of it says nothing."""


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
        note: Is told the attention of the queries 0, `STRIDE`, .. before the observed
            ones, `[group, queries, n]`, for one KV head after the other.
        gate: `[OBSERVED, num_heads, head_size_v]` float32, what the outputs of the
            observed queries are multiplied by; None: nothing.
        sink_logits: `[num_heads]` float32 of the sinks (`policy.softmax`), which take
            of what is left as they do of all; None: there are none.

    Returns:
        `[num_kv_heads, len(grid), OBSERVED]` float32.
    """
    group = query.shape[1] // key.shape[1]
    errors = []
    # A KV head at a time bounds the memory.
    for head in range(key.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        sink = None if sink_logits is None else sink_logits[heads]
        scored, observed, of_sink = _probabilities(
            query[:, heads], key[:, head], scale, softcap, sink
        )
        if note is not None:
            note(scored)
        full = observed @ value[:, head]
        for kept in _kept(scored, grid):
            part = observed[..., kept]
            # Of a head that looks at one token alone, others get nothing in float32.
            seen = part.sum(dim=-1, keepdim=True) + of_sink
            output = (part / seen.clamp(min=_LEAST_SEEN)) @ value[kept, head]
            change = (output - full).transpose(0, 1)
            if gate is not None:
                change = change * gate[:, heads]
            change = change.flatten(1)
            errors.append(((change @ gram[head]) * change).sum(dim=-1))
    shape = (key.shape[1], len(grid), OBSERVED)
    return torch.stack(errors).view(shape).clamp(min=0.0)


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    softcap: float,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of the scoring and of the observed queries.

    Args:
        query: `[n, group, head_size]`.
        key: `[n, head_size]`.
        sink: `[group]` logits, or None.

    Returns:
        `[group, (n - OBSERVED) / STRIDE, n]` and `[group, OBSERVED, n]`; what of the
        latter's the sink takes, `[group, OBSERVED, 1]`, or 0.
    """
    n = len(key)
    positions = torch.arange(n, device=key.device)
    rows = torch.cat([positions[: n - OBSERVED : STRIDE], positions[n - OBSERVED :]])
    logits = query[rows].transpose(0, 1) @ key.T * scale
    hidden = positions > rows[:, None]
    sink = None if sink is None else sink[:, None]
    probabilities, of_sink = attention_and_sink(
        logits, hidden, softcap=softcap, sink=sink
    )
    scored, observed = probabilities.split([len(rows) - OBSERVED, OBSERVED], dim=1)
    return scored, observed, of_sink if sink is None else of_sink[:, -OBSERVED:]


def _kept(scored: torch.Tensor, grid: Sequence[int]) -> list[torch.Tensor]:
    """For each budget the positions that the observed queries may see.

    The observed ones are all among them.
    """
    _, queries, n = scored.shape
    past = n - OBSERVED
    positions = torch.arange(n, device=scored.device)
    # Of the queries 0, STRIDE, ... before `past`, those at or after a position.
    could_see = queries - (positions + STRIDE - 1) // STRIDE
    score = scored.sum(dim=(0, 1)) / could_see.clamp(min=1)
    score[:SINKS] = float("inf")
    kept = []
    for budget in grid:
        start = past - min(budget // 2, past)
        heavy = score[:start].topk(min(budget - (past - start), start)).indices
        kept.append(torch.cat([heavy, positions[start:]]))
    return kept
