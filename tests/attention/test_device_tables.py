"""Placements as the Triton kernels read them."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.attention.triton_heads import CONFIG, SMALL, make_layers, params_of
from tests.attention.triton_state import DEVICE, empty_pages
from vllm_h2o.attention.device_tables import device_tables
from vllm_h2o.attention.ops import LayerParams
from vllm_h2o.attention.ops.triton.slots import head_and_part
from vllm_h2o.attention.placements import (
    BY_HEAD,
    UNIFORM,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.request_tables import RequestTables
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.placement import Placement, lend

KV_HEADS = 2


def entries(table, placement):
    return table.sizes[KV_HEADS * placement :][:KV_HEADS].tolist()


def tables_of(blocks, average):
    """Of one layer whose heads have so many blocks of 16 slots, once they part."""
    layouts = [[SlotLayout.of_blocks(CONFIG, 16, count) for count in blocks]]
    pages_of = lend([blocks], max(blocks))  # each its own
    placement = Placement(average * 16, layouts, pages_of)
    pages = empty_pages(4, len(blocks), 64, 16, torch.float32)
    layout = SlotLayout.of_blocks(CONFIG, 16, average)
    return device_tables(PlacementTable.of([pages], layout, placement).parts()[0])


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
    params = LayerParams(
        table.parts()[1].layouts(SMALL)[0], 0.1, 0.0, Mean(), table.parts()[1]
    )
    assert params.device_tables.pages is None
    assert entries(params.device_tables, SMALL)[1][:6] == [32, 16, 32, 32, 0, 32]


def test_heads_are_ranked_by_their_budgets():
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    own = params_of(layers, 0, 16).device_tables
    ranked = {
        placement: [sizes[6:] for sizes in entries(own, placement)]
        for placement in (UNIFORM, BY_HEAD, SMALL, SMALL + BY_HEAD)
    }
    assert ranked[UNIFORM] == [[0, 48], [1, 48]]
    assert ranked[BY_HEAD] == [[1, 80], [0, 16]]
    assert ranked[SMALL] == [[0, 32], [1, 32]]
    assert ranked[SMALL + BY_HEAD] == [[1, 48], [0, 16]]


def test_programs_are_those_of_the_placement_that_has_the_most():
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    own = params_of(layers, 0, 16).device_tables
    # Of 80 slots three splits are of 32; of 16 and of 48, of the smaller budget, too.
    assert own.most_splits(3, 32, 16) == 3 + 1
    assert own.most_splits(5, 16, 16) == 5 + 1
    assert own.most_splits(1, 16, 16) == 1 + 1
    assert own.most_parts(16, 3) == 5 + 3
    assert own.most_parts(128, 3) == 3 + 3
    # Of twice 48, where requests have not filled their budgets; of 80 and 16 only 3.
    assert own.most_splits(2, 16, 8) == own.most_parts(40, 1) == 2 + 2
    # One head of 9216 slots among seven of 1024, as `benchmarks.gpu` has.
    own = tables_of([64] * 3 + [576] + [64] * 4, 128)
    assert own.most_splits(9, 128, 32) == 9 + 7
    assert own.most_parts(512, 4) == 18 + 7 * 4


def lists_of(own, placement):
    """Columns and distances of the pages of a layer's KV heads."""
    found = []
    for sizes in entries(own, placement):
        pages = slice(sizes[4], sizes[4] + sizes[0] // 16)
        found.append([part[pages].tolist() for part in own.pages])
    return found


def test_placements_of_requests_have_places_of_their_own():
    """Where all layers find them that were made before; read as those that stay."""
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    layout = SlotLayout.of_blocks(CONFIG, 16, 3)
    table = PlacementTable(layers, layout, [5] * 3, 4)
    table.put(BY_HEAD, Placement.alike((3, 2), [3], CONFIG, 16))
    RequestPlacements(table, CONFIG, layout, first=2)
    params = [LayerParams(layout, 0.1, 0.0, Mean(), part) for part in table.parts()]
    own = [each.device_tables for each in params]
    first, second = (
        Placement.of_blocks(blocks, 3, CONFIG, 16)
        for blocks in ([[1, 5], [5, 1], [3, 3]], [[2, 1], [2, 4], [5, 4]])
    )
    small = Placement.of_blocks([[1, 4], [3, 1], [2, 1]], 2, CONFIG, 16)
    grown = small.grown(3, CONFIG, 16)
    for index, placement in ((2, first), (3, small), (2, second), (3, grown)):
        table.put(index, placement)
        for layer, mine in enumerate(own):
            alone = PlacementTable.of(layers, layout, placement)
            theirs = device_tables(alone.parts()[layer])
            for ours, stays in ((UNIFORM, UNIFORM), (BY_HEAD, UNIFORM), (index, 1)):
                assert lists_of(mine, ours) == lists_of(theirs, stays)
            ours, stays = entries(mine, index), entries(theirs, BY_HEAD)
            for at in (0, 1, 2, 3, 6, 7):
                assert [x[at] for x in ours] == [x[at] for x in stays]
            most = max(head.budget for head in placement.layouts[layer])
            assert [x[5] for x in ours] == [most] * 2
    kinds = {(x.pages.columns.data_ptr(), len(x.pages.columns)) for x in own}
    assert kinds == {(own[0].pages.columns.data_ptr(), 3 + 2 * 3 * 2 * 3)}
    taken = sum(x.nbytes for x in own[0].pages) + sum(x.sizes.nbytes for x in own)
    assert taken == RequestTables.bytes_of(3, 2, 3, alike=2, own=2)
    # A head has five pages at most, and one layer's have no more than ten.
    assert own[0].most_splits(5, 16, 16) == 2 * 5
    assert own[0].most_splits(64, 32, 16) == 160 // 32 + 2
    assert own[0].most_parts(64, 3) == 160 // 64 + 2 * 3


@triton.jit
def parts_kernel(
    out, sizes, part_slots, fewest,
    NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * NUM_KV_HEADS
    head, part = head_and_part(sizes, entry, part_slots, fewest, NUM_KV_HEADS, BLOCK_H)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + 2 * program, head)
    tl.store(out + 2 * program + 1, part)


@pytest.mark.parametrize(
    ("blocks", "fewest", "parts"),
    [
        ([1, 5, 3], 1, {1: 3, 2: 2, 0: 1}),
        ([1, 5, 3], 2, {1: 3, 2: 2, 0: 2}),
        ([3], 1, {0: 2}),
    ],
)
def test_programs_of_the_richest_head_start_first(blocks, fewest, parts):
    """In parts of 32 slots; the last programs have none."""
    heads = len(blocks)
    sizes = tables_of(blocks, 3).sizes.to(DEVICE)
    out = torch.zeros(2, 9, 2, dtype=torch.int32, device=DEVICE)
    parts_kernel[(2, 9)](out, sizes, 32, fewest, heads, triton.next_power_of_2(heads))
    expected = [[head, part] for head in parts for part in range(parts[head])]
    found = out[BY_HEAD].tolist()
    assert found[: len(expected)] == expected
    assert all(part >= parts[head] for head, part in found[len(expected) :])
    # All have 48 slots where requests have not filled their budgets.
    in_order = [[head, part] for head in range(heads) for part in range(2)]
    assert out[UNIFORM].tolist()[: len(in_order)] == in_order
