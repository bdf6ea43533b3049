"""Who has which placement, where each request has its own."""

import pytest
import torch

from tests.attention.test_decode import make_cache
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import (
    UNIFORM,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Queries
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.presets import PRESETS

NUM_LAYERS, NUM_HEADS, BLOCK, BUDGET_BLOCKS, LONGEST = 3, 2, 16, 4, 20
CONFIG = PRESETS["cake"]


@pytest.fixture
def requests():
    """Of an engine that runs two requests at once."""
    layout = SlotLayout.of_blocks(CONFIG, BLOCK, BUDGET_BLOCKS)
    caches = [
        make_cache(torch.float32, NUM_HEADS, 16, BLOCK) for _ in range(NUM_LAYERS)
    ]
    pages = [Pages.view(cache) for cache in caches]
    table = PlacementTable(pages, layout, [LONGEST] * NUM_LAYERS, capacity=3)
    return RequestPlacements(table, CONFIG, layout)


def split(requests, name, num_tokens=300, budget=BUDGET_BLOCKS * BLOCK):
    """Blocks of the layers' first heads, where the first layer is preferred by far."""
    states = [
        {
            "attention": torch.zeros(NUM_HEADS, num_tokens),
            "square": torch.full((NUM_HEADS, num_tokens), square),
            "entropy": torch.ones(NUM_HEADS, num_tokens),
        }
        for square in (1.0, 1e-9, 1e-9)
    ]
    first = max(num_tokens - 32, 0)
    queries = Queries(torch.arange(num_tokens), first, num_tokens)
    requests.split(name, states, queries, budget)
    table, index = requests.table, requests.index(name)
    layouts = table.placement(index).layouts
    blocks = [layer[0].budget_blocks for layer in layouts]
    assert table.sizes[:, index, :, 0].tolist() == [[n * BLOCK] * 2 for n in blocks]
    return blocks


def test_the_running_have_places_and_those_that_are_gone_make_room(requests):
    for name in ("a", "b"):
        split(requests, name)
    assert {requests.index("a"), requests.index("b")} == {1, 2}
    split(requests, "b")  # again, in the same place
    requests.drop("a")
    requests.drop("never seen")
    assert not requests.has("a")
    split(requests, "c")
    assert requests.index("c") not in (UNIFORM, requests.index("b"))


@pytest.mark.parametrize(
    ("num_tokens", "budget", "blocks"),
    [
        (300, 64, [10, 1, 1]),
        # A request with a budget of its own splits that.
        (300, 32, [4, 1, 1]),
        # No more than the prompt has,
        (100, 64, [7, 3, 2]),
        (40, 32, [3, 2, 1]),
        # unless it is within the budget, which generated tokens fill.
        (64, 64, [10, 1, 1]),
        (16, 64, [10, 1, 1]),
        (32, 32, [4, 1, 1]),
    ],
)
def test_a_head_gets_no_more_than_it_can_keep(requests, num_tokens, budget, blocks):
    assert split(requests, "a", num_tokens, budget) == blocks


@pytest.mark.parametrize("by_head", [False, True])
def test_budgets_have_places_next_to_each_other(requests, by_head):
    """As many as requests that can be in one step; the one unused for longest goes."""
    layout = requests.layout

    def by_profile(n):
        return Placement.of_blocks(
            [[n - 1] * 2, [n + 1] * 2, [n] * 2], n, CONFIG, BLOCK
        )

    made, ladder = [], Ladder.of_number(BUDGET_BLOCKS, BLOCK, 1024)
    split = (lambda n: made.append(n * BLOCK) or by_profile(n)) if by_head else None
    end = BudgetPlacements.indices(layout, max_requests=2)
    assert end == 6 and BudgetPlacements.indices(layout, max_requests=1) == 4
    layers = requests.table.layers
    table = PlacementTable(layers, layout, [LONGEST] * NUM_LAYERS, end)
    budgets = BudgetPlacements(table, CONFIG, ladder, 4, split)
    assert budgets.uniform_index(layout.budget) == UNIFORM and not made
    for budget in (32, 48, 48, 32):  # there is room for one
        assert budgets.uniform_index(budget) == 2
        sizes = table.sizes[:, 2, :, 0]
        assert (sizes == budget).all()
        assert table.placement(2).budget == budget
        assert (table.columns[:, 2, :, : budget // BLOCK].diff() == 1).all()
        assert not table.offsets[:, 2].any()
        if by_head:
            wanted = [budget - BLOCK, budget + BLOCK, budget]
            assert table.sizes[:, 3, 0, 0].tolist() == wanted
    assert made == ([32, 48, 32] if by_head else [])
    both = BudgetPlacements(table, CONFIG, ladder, end, split)
    assert {both.uniform_index(32), both.uniform_index(48)} == {2, 4}
    assert both.uniform_index(32) != both.uniform_index(48)
