"""The choice at the transition, on cases worked out by hand."""

import pytest
import torch

from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.selection import select_residents

LAYOUT = SlotLayout(4, 4, 4, 1, whole_blocks=False)


def chosen(values, layout=LAYOUT, pooling=1):
    positions, slots = select_residents(torch.tensor([values]), pooling, layout)
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
    positions, _ = select_residents(scores, 1, layout)
    older = scores[:, : num_tokens - 4].clone()
    older[:, 0] = float("inf")
    order = older.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(positions[:, :4], order[:, :4].sort(dim=1).values)


def test_no_heavy_set_at_all():
    """Streaming without sinks."""
    layout = SlotLayout(4, 0, 8, 0, whole_blocks=False)
    assert sorted(chosen([1.0] * 11, layout).values()) == [*range(3, 11)]


@pytest.mark.parametrize("unit", ["token", "block"])
def test_scores_that_are_not_numbers_choose_some_tokens(unit):
    """A model that overflows must not send a kernel outside its pages."""
    layout = SlotLayout(2, 4, 4, 2, whole_blocks=unit == "block")
    scores = [float("nan")] * 3 + [float("inf"), 1.0, 2.0, float("nan")] + [0.0] * 5
    slots = chosen(scores, layout, pooling=3)
    assert {slots[i] for i in range(4)} == {0, 1, 2, 3}
    assert sorted(slots.values())[4:] == [8, 9, 10, 11]


def test_pooling_keeps_the_neighbours_of_a_peak():
    scores = [0.0, 5.0, 0.0, 6.0, 0.0, 9.0, 0.0, 5.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    slots = chosen(scores, pooling=3)
    assert {slots[i] for i in range(4)} == {0, 4, 5, 6}


def test_whole_blocks():
    layout = SlotLayout(2, 4, 4, 1, whole_blocks=True)
    # Blocks: (0 1) pinned, (2 3) 5, (4 5) 6, (6 7) .. the ring from 6.
    scores = [0.0, 0.0, 5.0, 0.0, 3.0, 3.0, 9.0, 9.0, 9.0]
    slots = chosen(scores, layout)
    assert {slots[i] for i in range(4)} == {0, 1, 4, 5}
    assert {p for p in slots.values() if p > 5} == {6, 7, 8}
    assert slots[layout.slot(8)] == 8
