"""Who has which placement, where each request has its own."""

import pytest
import torch

from tests.attention.test_decode import make_cache
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import (
    UNIFORM,
    Budget,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Queries
from vllm_h2o.policy.placement import PageOf, Placement
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


def split(requests, name, num_tokens=300, budget=BUDGET_BLOCKS * BLOCK, is_fixed=True):
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
    requests.split(name, states, queries, Budget(budget, is_fixed))
    table, index = requests.table, requests.index(name)
    layouts = table.placement(index).layouts
    blocks = [layer[0].budget_blocks for layer in layouts]
    assert table.sizes[:, index, :, 0].tolist() == [[n * BLOCK] * 2 for n in blocks]
    return blocks


@pytest.mark.rule("R13")
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
    """Two of each request that can be in one step, as it may grow from one to the
    other; the one unused for longest goes."""
    layout = requests.layout

    def by_profile(n):
        return Placement.of_blocks(
            [[n - 1] * 2, [n + 1] * 2, [n] * 2], n, CONFIG, BLOCK
        )

    made, ladder = [], Ladder.of_number(BUDGET_BLOCKS, BLOCK, 1024)
    split = (lambda n, *_: made.append(n * BLOCK) or by_profile(n)) if by_head else None
    end = BudgetPlacements.indices(layout, 1, max_requests=1)
    assert end == 6 and BudgetPlacements.indices(layout, 1, max_requests=2) == 10
    assert BudgetPlacements.indices(layout, 1, max_requests=9) == 2 + 2 * 8
    layers = requests.table.layers
    table = PlacementTable(layers, layout, [LONGEST] * NUM_LAYERS, end)
    budgets = BudgetPlacements(table, CONFIG, ladder, 4, split)
    assert budgets.uniform_index(Budget(layout.budget, True)) == UNIFORM and not made
    for budget in (32, 48, 48, 32):  # there is room for one
        assert budgets.uniform_index(Budget(budget, True)) == 2
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
    assert {
        both.uniform_index(Budget(32, True)),
        both.uniform_index(Budget(48, True)),
    } == {2, 4}
    assert both.uniform_index(Budget(32, True)) != both.uniform_index(Budget(48, True))


def test_a_fixed_budget_is_split_apart_from_the_ladder(requests):
    """Where requests grow to it, heads do not have their own pages first."""
    layout, layers = requests.layout, requests.table.layers
    ladder = Ladder(BLOCK, (2, 3, BUDGET_BLOCKS), (64, 96, 1024), 0.25)
    made = []

    def by_profile(n, climbs, length_class):
        made.append((n, climbs, length_class))
        return Placement.of_blocks([[n] * 2] * 3, n, CONFIG, BLOCK)

    table = PlacementTable(layers, layout, [LONGEST] * NUM_LAYERS, 12)
    budgets = BudgetPlacements(table, CONFIG, ladder, 12, by_profile)
    assert budgets.uniform_index(Budget(64)) == UNIFORM
    fixed, shorter, own = Budget(48, True), Budget(48, True, 2), Budget(64, True)
    indices = [budgets.uniform_index(x) for x in (Budget(48), fixed, shorter, own)]
    assert len({*indices, UNIFORM}) == 5
    assert made == [(3, True, 0), (3, False, 0), (3, False, 2), (4, False, 0)]
    # What grows to it, where something does.
    assert table.sizes[0, indices, 0, 2].tolist() == [32, 48, 48, 64]
    assert table.sizes[0, UNIFORM, 0, 2] == 48


def test_a_head_that_grows_stays_within_the_longest_request(requests):
    assert split(requests, "a", 30, 32, is_fixed=True) == [4, 1, 1]
    requests.table.most_blocks = [5] * NUM_LAYERS
    assert split(requests, "a", 30, 32, is_fixed=False) == [3, 2, 1]
    requests.grow("a", BUDGET_BLOCKS * BLOCK)
    placement = requests.table.placement(requests.index("a"))
    assert [layer[0].budget_blocks for layer in placement.layouts] == [5, 4, 3]
    assert placement.pages[1][0][-2:] == [PageOf(1, 2), PageOf(1, 3)]
    assert len({page for layer in placement.pages for page in layer[0]}) == 12
    assert requests.table.sizes[:, requests.index("a"), 0, 2].tolist() == [48, 32, 16]
