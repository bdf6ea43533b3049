"""Who has which placement, where each request has its own."""

import pytest
import torch

from tests.attention.test_decode import make_cache
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import ALIKE, PlacementTable, RequestPlacements
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Queries
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


def split(requests, name, num_tokens=300):
    """Blocks of the layers' first heads, where the first layer is preferred by far."""
    states = [
        {
            "score": torch.zeros(NUM_HEADS, num_tokens),
            "square": torch.full((NUM_HEADS, num_tokens), square),
            "entropy": torch.ones(NUM_HEADS, num_tokens),
        }
        for square in (1.0, 1e-9, 1e-9)
    ]
    first = max(num_tokens - 32, 0)
    requests.split(name, states, Queries(torch.arange(num_tokens), first, num_tokens))
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
    assert requests.index("c") not in (ALIKE, requests.index("b"))


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [
        (300, [10, 1, 1]),
        # No more than the prompt has,
        (100, [7, 3, 2]),
        # unless it is within the budget, which generated tokens fill.
        (64, [10, 1, 1]),
        (16, [10, 1, 1]),
    ],
)
def test_a_head_gets_no_more_than_it_can_keep(requests, num_tokens, blocks):
    assert split(requests, "a", num_tokens) == blocks
