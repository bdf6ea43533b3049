"""Errors of heads by budget: gathered as computed, masked as meant."""

import pytest
import torch

from vllm_h2o.calibration.sensitivity import (
    LAST,
    OBSERVED,
    PAST,
    SINKS,
    STRIDE,
    Rule,
    grid_of,
    head_errors,
)

N, KV_HEADS, GROUP, SIZE, HIDDEN = 2 * OBSERVED + 72, 3, 2, 16, 40


SINK_LOGITS = torch.tensor([-30.0, 2.0, 0.0, 9.0, 1.0, -1.0])
"""Of each query head: one that takes nothing, and one that takes nearly all."""


SCORES = torch.rand(KV_HEADS, N, generator=torch.Generator().manual_seed(1))
RULES = {
    "past": PAST,
    "last": LAST,
    "scored": Rule(lambda head, paid: SCORES[head], recent=0.2, sinks=0),
}
"""By name; of the last one the scores are given."""


def score_of(rule, head, probs):
    """`[N]`, from the attention `[GROUP, N, N]` of a KV head."""
    past = N - OBSERVED
    if rule == "scored":
        return SCORES[head].clone()
    scoring = torch.arange(0, past, STRIDE)
    if rule == "last":
        scoring = torch.arange(past - 32, past)
    could_see = (scoring[:, None] >= torch.arange(N)).sum(dim=0)
    score = probs[:, scoring].sum(dim=(0, 1)) / could_see.clamp(min=1)
    if rule == "last":
        spans = [slice(max(t - 7, 0), min(t + 8, past)) for t in range(past)]
        score[:past] = torch.stack([score[span].max() for span in spans])
    score[:SINKS] = float("inf")
    return score


def by_masks(rule, query, key, value, weight, scale, softcap, grid, sinks=None):
    """`[num_kv_heads, grid, OBSERVED]`: keys that are dropped get a weight of 0.

    Args:
        weight: `[hidden, num_heads, head_size]` of the output projection.
    """
    share = {"past": 0.5, "last": 0.35, "scored": 0.2}[rule]
    past, errors = N - OBSERVED, []
    for head in range(KV_HEADS):
        heads = slice(head * GROUP, (head + 1) * GROUP)
        logits = query[:, heads].transpose(0, 1) @ key[:, head].T * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is None:
            sink = torch.full((GROUP, N, 1), float("-inf"))
        else:
            sink = sinks[heads, None, None].expand(GROUP, N, 1)
        probs = torch.cat([logits, sink], dim=-1).softmax(dim=-1)
        of_sink, probs = probs[:, N - OBSERVED :, -1:], probs[..., :-1]
        score = score_of(rule, head, probs)
        observed = probs[:, past:]
        full = observed @ value[:, head]
        for budget in grid:
            kept = torch.zeros(N)
            recent = min(int(budget * share), past)
            kept[past - recent :] = 1.0
            older = score[: past - recent]
            kept[older.topk(min(budget - recent, len(older))).indices] = 1.0
            part = observed * kept
            left = part.sum(dim=-1, keepdim=True) + of_sink
            output = (part / left) @ value[:, head]
            change = torch.einsum("hqd,xhd->qx", output - full, weight[:, heads])
            errors.append(change.pow(2).sum(dim=-1))
    return torch.stack(errors).view(KV_HEADS, len(grid), OBSERVED)


@pytest.fixture(scope="module")
def layer():
    """Query, key, value and output projection of a layer."""
    generator = torch.Generator().manual_seed(0)
    heads = KV_HEADS * GROUP
    shapes = (N, heads, SIZE), (N, KV_HEADS, SIZE), (N, KV_HEADS, SIZE)
    weight = torch.randn(HIDDEN, heads, SIZE, generator=generator)
    return *(torch.randn(s, generator=generator) for s in shapes), weight


def gram_of(weight):
    own = weight.permute(1, 2, 0).reshape(KV_HEADS, GROUP * SIZE, HIDDEN)
    return own @ own.transpose(1, 2)


@pytest.mark.parametrize(
    ("softcap", "sinks"), [(0.0, None), (2.0, None), (0.0, SINK_LOGITS)]
)
def test_errors_are_those_of_masked_attention(layer, softcap, sinks):
    query, key, value, weight = layer
    grid = [*grid_of(N), N]
    args = (SIZE**-0.5, softcap, grid)
    found = head_errors(
        query, key, value, gram_of(weight), *args, [*RULES.values()], sink_logits=sinks
    )
    expected = torch.stack(
        [by_masks(rule, query, key, value, weight, *args, sinks) for rule in RULES]
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert (found[:, :, 0].mean(dim=-1) > 2 * found[:, :, -2].mean(dim=-1)).all()
    # Nothing is lost where everything is kept.
    assert found[:, :, -1].max() < 1e-6


def test_a_head_that_writes_nothing_loses_nothing(layer):
    query, key, value, weight = layer
    weight = weight.clone()
    weight[:, GROUP : 2 * GROUP] = 0.0
    (found,) = head_errors(query, key, value, gram_of(weight), 0.25, 0.0, grid_of(N))
    assert found[1].max() == 0.0 and found[0].min() > 0.0 and found[2].min() > 0.0


def test_heads_of_two_ranks_are_those_of_one(layer):
    query, key, value, weight = layer
    gram, args = gram_of(weight), (0.25, 0.0, grid_of(N))
    (whole,) = head_errors(query, key, value, gram, *args)
    (first,) = head_errors(query[:, :GROUP], key[:, :1], value[:, :1], gram[:1], *args)
    (rest,) = head_errors(query[:, GROUP:], key[:, 1:], value[:, 1:], gram[1:], *args)
    torch.testing.assert_close(torch.cat([first, rest]), whole)
