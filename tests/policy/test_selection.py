"""Scores and the choice at the transition, on cases worked out by hand."""

import pytest
import torch

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.scores import observe
from vllm_h2o.policy.selection import select_residents

LAYOUT = SlotLayout(4, 4, 4, 1, whole_blocks=False)


def config_of(**options):
    return H2OConfig(**({"pooling": 1, "score": "sum", "sinks": 1} | options))


def chosen(scores, layout=LAYOUT, first_query=0, **options):
    scores = torch.tensor([scores])
    positions, slots = select_residents(
        scores, config_of(**options), layout, first_query
    )
    return dict(zip(slots.tolist(), positions[0].tolist(), strict=True))


def test_everything_fits():
    assert chosen([1.0] * 8) == {i: i for i in range(8)}


def test_sink_heaviest_and_recent():
    scores = [0.0, 1.0, 9.0, 2.0, 7.0, 8.0, 99.0, 0.0, 0.0, 0.0]
    slots = chosen(scores)
    assert {slots[i] for i in range(4)} == {0, 2, 4, 5}
    assert [slots[4 + (p - 4) % 4] for p in range(6, 10)] == [6, 7, 8, 9]


def test_ties_go_to_the_lower_position():
    slots = chosen([1.0] * 12)
    assert [slots[i] for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_tokens", [9, 40, 333])
def test_heaviest_of_many_ties_equal_a_stable_sort(num_tokens):
    """Also with scores of zero, and with infinite ones beside the sinks."""
    layout = SlotLayout(4, 4, 4, 1, whole_blocks=False)
    scores = torch.randint(0, 4, (5, num_tokens)).float()
    scores[0] = 0.0
    scores[1, 3] = float("inf")
    positions, _ = select_residents(scores, config_of(), layout, 0)
    older = scores[:, : num_tokens - 4].clone()
    older[:, 0] = float("inf")
    order = older.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(positions[:, :4], order[:, :4].sort(dim=1).values)


def test_no_heavy_set_at_all():
    """Streaming without sinks."""
    layout = SlotLayout(4, 0, 8, 0, whole_blocks=False)
    assert sorted(chosen([1.0] * 11, layout, sinks=0).values()) == [*range(3, 11)]


@pytest.mark.parametrize("unit", ["token", "block"])
def test_scores_that_are_not_numbers_choose_some_tokens(unit):
    """A model that overflows must not send a kernel outside its pages."""
    layout = SlotLayout(2, 4, 4, 2, whole_blocks=unit == "block")
    scores = [float("nan")] * 3 + [float("inf"), 1.0, 2.0, float("nan")] + [0.0] * 5
    slots = chosen(scores, layout, sinks=2, pooling=3)
    assert {slots[i] for i in range(4)} == {0, 1, 2, 3}
    assert sorted(slots.values())[4:] == [8, 9, 10, 11]


def test_mean_takes_away_the_head_start_of_old_tokens():
    scores = [0.0, 3.0, 3.0, 3.0, 2.9, 2.9, 2.9, 2.9, 0.0, 0.0, 0.0, 0.0]
    assert {chosen(scores)[i] for i in range(4)} == {0, 1, 2, 3}
    assert {chosen(scores, score="mean")[i] for i in range(4)} == {0, 5, 6, 7}


def test_pooling_keeps_the_neighbours_of_a_peak():
    scores = [0.0, 5.0, 0.0, 6.0, 0.0, 9.0, 0.0, 5.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    slots = chosen(scores, pooling=3)
    assert {slots[i] for i in range(4)} == {0, 4, 5, 6}


def test_whole_blocks():
    layout = SlotLayout(2, 4, 4, 1, whole_blocks=True)
    # Blocks: (0 1) pinned, (2 3) 5, (4 5) 6, (6 7) .. the ring from 6.
    scores = [0.0, 0.0, 5.0, 0.0, 3.0, 3.0, 9.0, 9.0, 9.0]
    slots = chosen(scores, layout, sinks=1)
    assert {slots[i] for i in range(4)} == {0, 1, 4, 5}
    assert {p for p in slots.values() if p > 5} == {6, 7, 8}
    assert slots[layout.slot(8)] == 8


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_observing_in_parts_equals_observing_at_once(decay):
    torch.manual_seed(0)
    query, keys = torch.randn(300, 6, 16), torch.randn(2, 16, 300)
    options = {"scale": 0.25, "score_decay": decay}
    at_once = observe(query, keys, 0, **options)
    parts = torch.zeros(2, 300)
    for start, stop in ((0, 1), (1, 130), (130, 299), (299, 300)):
        observe(query[start:stop], keys[:, :, :stop], start, scores=parts, **options)
    torch.testing.assert_close(parts, at_once)
    if decay == 1.0:
        # Every query gives each of its heads a mass of one.
        torch.testing.assert_close(at_once.sum(), torch.tensor(300.0 * 6))
    if decay == 0.0:
        last = (query[-1].view(2, 3, 16) @ keys * 0.25).softmax(-1).sum(1)
        torch.testing.assert_close(at_once, last)
