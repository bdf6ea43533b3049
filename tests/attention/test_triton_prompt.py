"""Prompt scoring and the transition in Triton against torch."""

import pytest
import torch

from tests.attention.triton_checks import (
    SCALE,
    WITH_KERNELS,
    check_scores,
    check_transition,
    make_prompt,
    make_queries,
    scoring_params,
)
from tests.attention.triton_state import DEVICE
from vllm_h2o.attention.ops.triton import observe, scoring
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.presets import PRESETS


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_window_scores(decay):
    check_scores(make_prompt(149), make_queries(7, 6), 149, decay)


def test_all_queries_score():
    check_scores(make_prompt(145), make_queries(145, 4), 145)


def test_log_sum_exp_in_splits(monkeypatch):
    """On a device with room for more programs than there are queries."""
    monkeypatch.setattr(scoring, "num_sms", lambda device: 8)
    check_scores(make_prompt(149), make_queries(149, 2), 149)


def test_soft_capped_scores():
    check_scores(make_prompt(83), make_queries(70, 2), 83, softcap=3.0)


def test_scores_beside_sinks():
    sinks = torch.tensor([-2.0, 0.0, 8.0, 300.0], device=DEVICE)
    check_scores(make_prompt(83), make_queries(70, 4), 83, sinks=sinks)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_window_that_spans_chunks(decay):
    """Scores of earlier queries decay and stay; what is not seen yet has none."""
    scores = torch.rand(2, 120, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scores[:, 90:] = 0.0
    check_scores(make_prompt(90), make_queries(20, 4), 90, decay, scores=scores)


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_size", [80, 128])
def test_scores_of_grouped_heads(group, head_size):
    prompt = make_prompt(50, num_kv_heads=1, head_size=head_size)
    check_scores(prompt, make_queries(9, group, head_size), 50)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision(dtype):
    prompt = make_prompt(70, dtype)
    check_scores(prompt, make_queries(33, 4, dtype=dtype), 70)


def test_given_log_sum_exp_is_used():
    """Flash attention's, of the logits over every visible token."""
    (pages, dense, _), query = make_prompt(100), make_queries(9, 4)
    keys = pages.keys[dense].permute(1, 2, 0, 3).flatten(2)[:, :, :100]
    logits = torch.einsum("qhd,hdt->hqt", query, keys.repeat_interleave(2, 0)) * SCALE
    hidden = torch.ones(9, 100, device=DEVICE).triu(92).bool()
    lse = logits.masked_fill(hidden, float("-inf")).logsumexp(-1)
    computed, given, halved = torch.zeros(3, 2, 100, device=DEVICE)
    observe(query, pages, dense, 91, {"attention": computed}, scoring_params())
    observe(query, pages, dense, 91, {"attention": given}, scoring_params(), lse=lse)
    observe(
        query,
        pages,
        dense,
        91,
        {"attention": halved},
        scoring_params(),
        lse=lse + 2**0.5,
    )
    torch.testing.assert_close(given, computed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(halved, computed / torch.e ** (2**0.5))


LAYOUT = SlotLayout(16, 32, 48, sinks=4, whole_blocks=False)


@pytest.mark.parametrize("num_tokens", [1, 33, 80, 81, 141])
def test_transition(num_tokens):
    check_transition(num_tokens, H2OConfig(observation_window=8, pooling=3), LAYOUT)


@pytest.mark.parametrize("policy", WITH_KERNELS)
def test_transition_of_every_policy(policy):
    check_transition(123, PRESETS[policy], LAYOUT)


def test_transition_of_whole_blocks():
    config = H2OConfig(eviction_unit="block", score="sum")
    layout = SlotLayout(48, 48, 48, sinks=0, whole_blocks=True)
    check_transition(251, config, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [96, 512])
def test_transition_in_half_precision(dtype, head_size):
    check_transition(90, H2OConfig(), LAYOUT, dtype, head_size)
