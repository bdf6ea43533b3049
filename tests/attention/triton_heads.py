"""Steps with budgets by head, borrowed pages and all, on a device and by the reference.

Used by the tests and, on a GPU, by `python -m benchmarks.gpu`.
"""

from dataclasses import replace

import torch

from tests.attention.triton_checks import TOLERANCE
from tests.attention.triton_state import DEVICE, clone, content, empty_pages, packed
from vllm_h2o.attention.ops import (
    Held,
    LayerParams,
    ResidentRows,
    ScoredLayer,
    reference,
)
from vllm_h2o.attention.ops.triton import (
    DecodeScratch,
    Tuning,
    batches,
    decode_resident,
)
from vllm_h2o.attention.ops.triton.bounds import set_bounds
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean
from vllm_h2o.policy.placement import Placement, layouts_of, lend_by_budget

CONFIG = H2OConfig(sinks=4, recent_ratio=0.5, pooling=3)
BUDGET_BLOCKS = 3
# Of three layers of two heads. Layer 2 has no head beyond the common budget.
BLOCKS = [[1, 5], [5, 1], [2, 2]]
SMALL_BLOCKS, SMALL_BUDGET_BLOCKS = [[1, 3], [3, 1], [2, 2]], 2
"""Of the budget that grows to the other."""
SMALL = 2
"""Where the table has its placements, as the other's are at 0."""


def make_layers(dtype, head_size, size, num_rows, reads_part=False):
    """Pages of every layer full of tokens, but for blocks that no row has."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = num_rows * BUDGET_BLOCKS + 3
    layers = []
    for _ in BLOCKS:
        pages = empty_pages(num_blocks, 2, head_size, size, dtype, "cpu", reads_part)
        held = slice(2, num_blocks)
        for name in ("keys", "values") + ("key_scales", "value_scales") * (
            pages.quantized
        ):
            part = getattr(pages, name)[held]
            content = torch.randn(part.shape, generator=generator)
            if part.dtype == torch.int8:
                content *= 40
            elif "scales" in name:  # of vectors about as long as those of other types
                content = content.abs() / 40
            part.copy_(content)
        part = pages.attention[held]
        part.copy_(torch.randint(1, 9, part.shape, generator=generator) / 4)
        part = pages.births[held]
        part.copy_(torch.randint(0, 2 * size, part.shape, generator=generator))
        layers.append(pages)
    blocks = torch.randperm(num_rows * BUDGET_BLOCKS, generator=generator) + 2
    return layers, blocks.view(num_rows, BUDGET_BLOCKS).int()


def params_of(layers, layer, size, **options):
    layout = SlotLayout.of_blocks(CONFIG, size, BUDGET_BLOCKS)
    budgets = SMALL_BUDGET_BLOCKS, BUDGET_BLOCKS
    pages = lend_by_budget([SMALL_BLOCKS, BLOCKS], budgets)
    first = [
        [mine[:count] for mine, count in zip(*heads, strict=True)]
        for heads in zip(pages, SMALL_BLOCKS, strict=True)
    ]
    small = layouts_of(SMALL_BLOCKS, CONFIG, size)
    small = Placement(SMALL_BUDGET_BLOCKS * size, small, first)
    large = layouts_of(BLOCKS, CONFIG, size)
    large = Placement(BUDGET_BLOCKS * size, large, pages, small)
    most = [max(heads) for heads in BLOCKS]
    table = PlacementTable(layers, layout, most, SMALL + 2)
    table.put(BY_HEAD, large)
    alike = Placement.alike((3, 2), [SMALL_BUDGET_BLOCKS], CONFIG, size)
    table.put(SMALL + UNIFORM, alike)
    table.put(SMALL + BY_HEAD, small)
    own = table.parts()[layer]
    options = {"softcap": 0.0, "method": Mean()} | options
    return LayerParams(layout, 0.17, placements=own, **options)


def check_heads(
    layer,
    positions,
    dtype=torch.float32,
    head_size=64,
    size=16,
    group=3,
    grown_at=None,
    small=(),
    quantized=False,
    **how,
):
    """One step of both: outputs and the state of all layers agree.

    Heads have grown from the small budget where `grown_at` is not 0; the rows in
    `small` have it.
    """
    grown_at = torch.tensor(grown_at or [0] * len(positions))
    of = torch.int8 if quantized else dtype
    reads_part = how.get("read", 1.0) < 1.0
    layers, table = make_layers(of, head_size, size, len(positions), reads_part)
    generator = torch.Generator().manual_seed(1)

    def random(num_heads):
        shape = (len(positions), num_heads, head_size)
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = random(2 * group) * 2, random(2), random(2)
    budget = torch.full((len(positions),), BUDGET_BLOCKS * size)
    budget[list(small)] = SMALL_BUDGET_BLOCKS * size
    filled = (torch.tensor(positions) >= budget) | (grown_at > 0)
    placements = torch.where(filled, BY_HEAD, UNIFORM).int()
    placements[list(small)] += SMALL
    rows = (table, torch.tensor(positions), torch.tensor([9] * len(positions)))
    results = []
    for op, device in ((reference.decode_resident, "cpu"), (decode_resident, DEVICE)):
        own = [clone(pages, device) for pages in layers]
        params = params_of(own, layer, size, **how)
        query, key, value = (tensor.to(device) for tensor in tokens)
        output = torch.full_like(query, float("nan"))
        on_device = ResidentRows(
            *(tensor.to(device) for tensor in rows),
            placements=placements.to(device),
            grown_at=grown_at.to(device),
        )
        if op is decode_resident:
            most = int(params.placements.sizes[BY_HEAD, :, 0].sum())
            starts, end = packed(*rows[1:], 2, max(most, 2 * BUDGET_BLOCKS * size))
            scratch = DecodeScratch.allocate(
                len(positions), 2 * group, 2, head_size, params.layout.budget,
                params.largest_budget, DEVICE, Tuning(3, 16), end + 1,
                page_slots=size * reads_part,
            )  # fmt: skip
            scratch.logits.fill_(float("nan"))
            on_device = replace(
                on_device, scratch=scratch, logit_starts=starts.to(DEVICE)
            )
            (batch,) = batches([ScoredLayer(own[layer], {}, params)])
            for row, position in enumerate(positions):
                place = int(placements[row]), position, int(grown_at[row])
                set_bounds(batch, Held(table[row].to(device), *place))
        op(query, key, value, own[layer], on_device, params, output)
        if op is decode_resident:
            assert scratch.logits[-1].isnan(), "logits of other rows were written"
        results.append((output.cpu(), [clone(pages, "cpu") for pages in own]))
    (expected, expected_layers), (actual, actual_layers) = results
    torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])
    for mine, theirs, before in zip(
        actual_layers, expected_layers, layers, strict=True
    ):
        torch.testing.assert_close(
            mine.attention, theirs.attention, rtol=1e-4, atol=1e-6, equal_nan=True
        )
        theirs.attention.copy_(mine.attention)
        if reads_part:  # the reference has no bounds
            theirs.bounds.copy_(mine.bounds)
        assert torch.equal(content(mine), content(theirs))
        assert torch.equal(content(mine)[: 2 * mine.page_stride], _start(before))
    return layers, actual_layers


def _start(pages):
    return content(pages)[: 2 * pages.page_stride]
