"""Budgets by head in Triton against the torch reference, borrowed pages and all."""

from dataclasses import replace

import pytest
import torch

from tests.attention.triton_checks import TOLERANCE, check_choice
from tests.attention.triton_state import DEVICE, clone, content, empty_pages
from vllm_h2o.attention.ops import DecodeParams, ResidentRows, reference
from vllm_h2o.attention.ops.triton import (
    DecodeScratch,
    Tuning,
    compress,
    decode_resident,
    launch,
)
from vllm_h2o.attention.placements import ALIKE, OWN, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean, Sum
from vllm_h2o.policy.placement import Placement

CONFIG = H2OConfig(sinks=4, recent_ratio=0.5, pooling=3)
BUDGET_BLOCKS = 3
# Of three layers of two heads. Layer 2 has no head beyond the common budget.
BLOCKS = [[1, 5], [5, 1], [2, 2]]


def make_layers(dtype, head_size, size, num_rows):
    """Pages of every layer full of tokens, but for blocks that no row has."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = num_rows * BUDGET_BLOCKS + 3
    layers = []
    for _ in BLOCKS:
        pages = empty_pages(num_blocks, 2, head_size, size, dtype)
        held = slice(2, num_blocks)
        for name in ("keys", "values"):
            part = getattr(pages, name)[held]
            part.copy_(torch.randn(part.shape, generator=generator))
        part = pages.scores[held]
        part.copy_(torch.randint(1, 9, part.shape, generator=generator) / 4)
        part = pages.births[held]
        part.copy_(torch.randint(0, 2 * size, part.shape, generator=generator))
        layers.append(pages)
    blocks = torch.randperm(num_rows * BUDGET_BLOCKS, generator=generator) + 2
    return layers, blocks.view(num_rows, BUDGET_BLOCKS).int()


def params_of(layers, layer, size, **options):
    layout = SlotLayout.of_blocks(CONFIG, size, BUDGET_BLOCKS)
    placement = Placement.of_blocks(BLOCKS, BUDGET_BLOCKS, CONFIG, size)
    own = PlacementTable.of(layers, layout, placement).parts()[layer]
    options = {"softcap": 0.0, "method": Mean()} | options
    return DecodeParams(layout, 0.17, placements=own, **options)


def check(layer, positions, dtype=torch.float32, head_size=64, size=16, group=3, **how):
    """One step of both: outputs and the state of all layers agree."""
    layers, table = make_layers(dtype, head_size, size, len(positions))
    generator = torch.Generator().manual_seed(1)

    def random(num_heads):
        shape = (len(positions), num_heads, head_size)
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = random(2 * group) * 2, random(2), random(2)
    budget = BUDGET_BLOCKS * size
    placements = torch.tensor([OWN if p >= budget else ALIKE for p in positions]).int()
    rows = (table, torch.tensor(positions), torch.tensor([9] * len(positions)))
    results = []
    for op, device in ((reference.decode_resident, "cpu"), (decode_resident, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, layer, size, **how)
        query, key, value = (tensor.to(device) for tensor in tokens)
        output = torch.full_like(query, float("nan"))
        on_device = ResidentRows(
            *(tensor.to(device) for tensor in rows), placements=placements.to(device)
        )
        if op is decode_resident:
            scratch = DecodeScratch.allocate(
                len(positions), 2 * group, 2, head_size, params.layout.budget,
                params.largest_budget, DEVICE, Tuning(3, 16),
            )  # fmt: skip
            on_device = replace(on_device, scratch=scratch)
        op(query, key, value, own[layer], on_device, params, output)
        results.append((output.cpu(), [clone(pages, "cpu") for pages in own]))
    (expected, expected_layers), (actual, actual_layers) = results
    torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])
    for mine, theirs, before in zip(
        actual_layers, expected_layers, layers, strict=True
    ):
        torch.testing.assert_close(
            mine.scores, theirs.scores, rtol=1e-4, atol=1e-6, equal_nan=True
        )
        theirs.scores.copy_(mine.scores)
        assert torch.equal(content(mine), content(theirs))
        assert torch.equal(content(mine)[: 2 * mine.page_stride], _start(before))
    return layers, actual_layers


def _start(pages):
    return content(pages)[: 2 * pages.page_stride]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_step_equals_reference(layer):
    """Before heads part, in the step that they do, and long after; padding too.

    A poor head then competes for one block, a rich one still appends until 80.
    """
    positions = [5, 47, 48, 60, 79, 80, 137, -1]
    layers, after = check(layer, positions)
    lenders = [i for i in range(3) if i != layer]
    borrowed = any(
        not torch.equal(content(layers[i]), content(after[i])) for i in lenders
    )
    assert borrowed == (layer != 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_size", "size"), [(80, 16), (64, 48), (128, 32)])
def test_shapes_and_dtypes(head_size, size, dtype):
    positions = [3 * size - 1, 3 * size, 6 * size + 5]
    check(0, positions, dtype, head_size, size, group=2)


@pytest.mark.parametrize(
    "how", [{"method": Sum()}, {"method": Mean(0.9)}, {"softcap": 5.0}], ids=str
)
def test_scores(how):
    check(1, [48, 100], **how)


def test_tiles_of_scores(monkeypatch):
    monkeypatch.setattr(launch, "SCORE_TILE", 16)
    check(0, [48, 90])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_parting_in_place(layer):
    """Slots are sources and targets at once; nothing is overwritten unread."""
    layers, table = make_layers(torch.float32, 64, 16, 1)
    results = []
    for copy, device in ((reference.compress, "cpu"), (compress, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, layer, 16)
        blocks = table[0].to(device)
        scores = own[layer].scores[blocks.long()].transpose(0, 1).flatten(1)
        chosen = check_choice(scores, OWN, 9, CONFIG, params)
        assert {*(chosen.slots >= 0).sum(dim=1).tolist()} <= {16, 32, 48}
        state = {"score": scores}
        copy(own[layer], blocks, blocks, OWN, chosen, state, params)
        results.append([clone(pages, "cpu") for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(content(actual), content(expected))
    assert not torch.equal(content(results[0][layer]), content(layers[layer]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_transition_into_borrowed_pages(dtype):
    """A prompt of 77 tokens: one head keeps 16 of them, the other all."""
    layers, table = make_layers(dtype, 80, 16, 3)
    dense, resident = table[:2].flatten()[:5], table[2]
    scores = torch.rand(2, 77, generator=torch.Generator().manual_seed(2))
    results = []
    for copy, device in ((reference.compress, "cpu"), (compress, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, 0, 16)
        state = {"score": scores.to(device)}
        chosen = check_choice(state["score"], OWN, 60, CONFIG, params)
        assert (chosen.slots >= 0).sum(dim=1).tolist() == [16, 77]
        copy(own[0], dense.to(device), resident.to(device), OWN, chosen, state, params)
        results.append([clone(pages, "cpu") for pages in own])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(content(actual), content(expected))
    assert not torch.equal(content(results[0][1]), content(layers[1]))


def test_tables_reach_past_every_budget():
    """As wide in a layer whose heads all have less than the common budget."""
    layers, _ = make_layers(torch.float16, 64, 16, 1)
    sizes, columns, offsets, words = params_of(layers, 2, 16).head_tables
    assert sizes.tolist() == [[48, 16], [48, 16], [32, 16], [32, 16]]
    assert columns.shape == offsets.shape == words.shape == (4, 5)
    assert columns[0].tolist() == [0, 1, 2, 3, 4] and not offsets[:2].any()
    params = params_of(layers, 0, 16)
    assert params.largest_budget == 80
    distance = layers[1].keys.data_ptr() - layers[0].keys.data_ptr()
    lent = params.placements.pages(OWN)[1][3:]
    assert {page.layer for page in lent} <= {1, 2}
    at = [page.layer for page in lent].index(1)
    assert params.head_tables[2][2 + 1, 3 + at] == distance // 2
    assert params.head_tables[3][2 + 1, 3 + at] == distance // 4
    assert replace(params, placements=None).head_tables is None
