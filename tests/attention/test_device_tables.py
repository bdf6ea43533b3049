"""Placements as the Triton kernels read them."""

from dataclasses import replace

import torch

from tests.attention.triton_heads import CONFIG, SMALL, make_layers, params_of
from vllm_h2o.attention.ops import DecodeParams
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, PlacementTable
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.placement import Placement

KV_HEADS = 2


def entries(table, placement):
    return table.sizes[KV_HEADS * placement :][:KV_HEADS].tolist()


def test_sizes_of_a_layer():
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    params = params_of(layers, 1, 16)
    own = params.device_tables
    assert params.largest_budget == 80 and own.sizes.dtype == torch.int32
    # Budget, heavy slots, before it grew, of heads before; the richest of the layer.
    for placement, expected in {
        UNIFORM: [[48, 16, 48, 0, 80], [48, 16, 48, 48, 80]],
        BY_HEAD: [[80, 32, 48, 0, 80], [16, 8, 16, 80, 80]],
        SMALL + UNIFORM: [[32, 16, 32, 0, 48], [32, 16, 32, 32, 48]],
        SMALL + BY_HEAD: [[48, 16, 48, 0, 48], [16, 8, 16, 48, 48]],
    }.items():
        found = [[*sizes[:4], sizes[5]] for sizes in entries(own, placement)]
        assert found == expected
    assert replace(params, placements=None).device_tables is None
    # Where no head has as much as all have at first.
    own = params_of(layers, 2, 16).device_tables
    assert [sizes[5] for sizes in entries(own, UNIFORM)] == [48, 48]
    assert [sizes[5] for sizes in entries(own, BY_HEAD)] == [32, 32]


def test_lists_of_pages_are_shared():
    """By all that have pages of their own, and by a head's budgets."""
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    params = params_of(layers, 0, 16)
    own = params.device_tables
    starts = {
        placement: [sizes[4] for sizes in entries(own, placement)]
        for placement in (UNIFORM, BY_HEAD, SMALL, SMALL + BY_HEAD)
    }
    assert starts[BY_HEAD] == starts[SMALL + BY_HEAD]
    assert starts[UNIFORM] == starts[SMALL]
    columns, elements, words = own.pages
    # Three pages in order, of which the poor head has the first, and five of the rich.
    assert len(columns) == len(elements) == len(words) == 3 + 5
    poor, rich = starts[BY_HEAD]
    assert starts[UNIFORM] == [poor, poor]
    assert columns[poor:][:3].tolist() == [0, 1, 2]
    pages = params.placements.pages(BY_HEAD)[1]
    assert columns[rich:][:5].tolist() == [page.column for page in pages]
    for at, page in enumerate(pages, start=rich):
        distance = layers[page.layer].keys.data_ptr() - layers[0].keys.data_ptr()
        assert (elements[at], words[at]) == (distance // 2, distance // 4)
    assert {page.layer for page in pages} > {0}
    # Of a layer in which nobody borrows too, or it would be compiled for apart.
    assert len(params_of(layers, 2, 16).device_tables.pages.columns) == 3


def test_no_lists_where_all_heads_have_pages_of_their_own():
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    table = PlacementTable(layers, SlotLayout.of_blocks(CONFIG, 16, 3), [3] * 3, 4)
    table.put(SMALL, Placement.alike((3, 2), [2], CONFIG, 16))
    params = DecodeParams(
        table.parts()[1].layouts(SMALL)[0], 0.1, 0.0, Mean(), table.parts()[1]
    )
    assert params.device_tables.pages is None
    assert entries(params.device_tables, SMALL)[1] == [32, 16, 32, 32, 0, 32]
