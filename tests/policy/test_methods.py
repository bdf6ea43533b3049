"""What tokens are worth: formulas, and what holds for every method."""

import pytest
import torch

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import METHODS, Mean, Queries, Sum, fused_form_of
from vllm_h2o.policy.probabilities import tiles

VARIANTS = [*(cls() for cls in METHODS.values()), Sum(0.5), Sum(0.0), Mean(0.9)]
OPTIONS = {"scale": 0.25, "softcap": 3.0}


def observed(method, query, keys, cuts):
    """The scores of a prompt whose queries come in parts."""
    scores = torch.zeros(len(keys), keys.shape[-1])
    for start, stop in zip([0, *cuts], [*cuts, len(query)], strict=True):
        for probs in tiles(query[start:stop], keys[:, :, :stop], start, **OPTIONS):
            method.observe({"score": scores[:, : probs.shape[-1]]}, probs)
    return scores


@pytest.fixture(scope="module")
def prompt():
    """Queries of six heads, keys of two."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(300, 6, 16, generator=generator)
    return query, torch.randn(2, 16, 300, generator=generator)


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_observing_in_parts_equals_observing_at_once(method, prompt):
    at_once = observed(method, *prompt, [])
    torch.testing.assert_close(observed(method, *prompt, [1, 130, 299]), at_once)


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_heads_are_observed_alone_as_side_by_side(method, prompt):
    query, keys = prompt
    probs = next(tiles(query[:90], keys[:, :, :90], 0, **OPTIONS))
    side_by_side, alone = torch.rand(2, 90).expand(2, -1, -1).clone()
    method.observe({"score": side_by_side}, probs)
    queries = Queries(torch.arange(90), 7, 90)
    values = method.value({"score": side_by_side}, queries)
    assert values.shape == (2, 90)
    for head, scores in enumerate(alone):
        method.observe({"score": scores}, probs[head])
        torch.testing.assert_close(scores, side_by_side[head])
        value = method.value({"score": scores}, queries)
        torch.testing.assert_close(value, values[head])


def test_every_query_gives_each_of_its_heads_a_mass_of_one(prompt):
    total = observed(Sum(), *prompt, []).sum()
    torch.testing.assert_close(total, torch.tensor(300.0 * 6))


def test_without_memory_the_newest_query_counts(prompt):
    query, keys = prompt
    logits = query[-1].view(2, 3, 16) @ keys * OPTIONS["scale"]
    capped = OPTIONS["softcap"] * torch.tanh(logits / OPTIONS["softcap"])
    last = capped.softmax(-1).sum(1)
    torch.testing.assert_close(observed(Sum(0.0), query, keys, [5]), last)


def test_mean_takes_away_the_head_start_of_old_tokens():
    scores = torch.tensor([3.0, 3.0, 2.9, 2.9, 0.0])
    queries = Queries(torch.arange(5), 0, 5)
    assert Sum().value({"score": scores}, queries).argmax() == 0
    expected = scores / torch.tensor([5, 4, 3, 2, 1])
    assert torch.equal(Mean().value({"score": scores}, queries), expected)


def test_queries_that_scored_are_counted():
    """Those from position 3 to 5; a token counts from its own on."""
    positions = torch.tensor([0, 3, 4, 5, 9])
    assert Queries(positions, 3, 6).count().tolist() == [3, 3, 2, 1, 1]


def test_a_subclass_has_no_kernel_of_its_base():
    class Other(Mean):
        name = "other"

    assert [fused_form_of(cls()) for cls in (Sum, Mean, Other)] == ["sum", "mean", None]


def test_the_config_gives_a_method_its_options():
    assert H2OConfig(score="sum", score_decay=0.5).method == Sum(0.5)
    assert H2OConfig().method == Mean()
