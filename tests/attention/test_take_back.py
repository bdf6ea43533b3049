"""Drafts are decoded in turn and taken back: pages are as if they had not been."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.attention.test_decode import (
    THREADS,
    make_cache,
    pages_of,
    params_of,
    part_in_place,
    put_growing,
    threads,
)
from vllm_h2o.attention.ops import (
    DraftLog,
    Held,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
    cpu,
    reference,
)
from vllm_h2o.attention.ops.resident import Resident, scales_of
from vllm_h2o.attention.placements import PlacementTable

GROUP, NUM_KV_HEADS, HEAD_SIZE = 3, 3, 64
KERNELS = [pytest.param(reference, 1, id="reference")]
KERNELS += [pytest.param(cpu, number, id=f"C-{number}") for number in THREADS]


class Side:
    """Rows that decode; drafts among their tokens or not."""

    def __init__(self, kernel, params, dtype, quantized, first_position):
        self.kernel, self.params, self.dtype = kernel, params, dtype
        cache = make_cache(dtype, NUM_KV_HEADS, HEAD_SIZE, params.layout.block_size)
        self.pages = pages_of(cache, params, quantized)
        width = params.layout.budget_blocks
        num_rows = len(first_position)
        table = torch.arange(1, num_rows * width + 1, dtype=torch.int32)
        self.blocks = table.flip(0).view(num_rows, width)
        self.positions = torch.tensor(first_position)
        self.placements = torch.zeros(num_rows, dtype=torch.int32)
        self.grown_at = torch.zeros(num_rows, dtype=torch.int64)

    def rows(self, **more):
        never = torch.zeros_like(self.positions)
        own = {}
        if self.params.placements is not None:
            own = {"placements": self.placements, "grown_at": self.grown_at}
        return ResidentRows(self.blocks, self.positions.clone(), never, **own, **more)

    def decode(self, tokens, log=True):
        """Some tokens of each row, of which those after the first are drafts.

        Args:
            tokens: Of each row `[n, 3 * heads, head_size]` queries, keys and values.
            log: Whether they can be taken back.

        Returns:
            Of each row `[n, num_heads, head_size]`.
        """
        counts = torch.tensor([len(mine) for mine in tokens], dtype=torch.int32)
        starts = counts.cumsum(0).int() - counts
        rows = self.rows(counts=counts, starts=starts)
        sizes = [GROUP * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
        parts = torch.cat(tokens).to(self.dtype).split(sizes, dim=1)
        query, key, value = (part.contiguous() for part in parts)
        output = torch.full_like(query, float("nan"))
        most = int(counts.max()) - 1
        noted = None
        if log and most:
            noted = DraftLog.by_row(self.pages, self.params, len(tokens), most)
        self.kernel.decode_resident(
            query, key, value, self.pages, rows, self.params, output, noted
        )
        self.decoded, self.noted = rows, noted
        self.positions = self.positions + counts
        return output.split(counts.tolist())

    def take_back(self, refused):
        refused = torch.tensor(refused, dtype=torch.int32)
        if self.noted is not None:
            layers = [LoggedLayer(self.pages, self.params, self.noted)]
            self.kernel.take_back(layers, self.decoded, refused)
        self.positions = self.positions - refused

    def held(self):
        """All that rows hold, part by part."""
        return held_slots(self.pages, self.rows(), self.params)


def held_slots(pages, rows, params):
    """Row, KV head, part and content of all slots that hold a token."""
    for row in range(len(rows.positions)):
        for head in range(pages.keys.shape[1]):
            mine = Resident(pages, rows, row, head, params)
            slots = torch.arange(min(mine.place, mine.layout.budget))
            for what in ("keys", "values", "births", "attention", *scales_of(pages)):
                yield row, head, what, mine.get(what, slots)


def compare(speculating, plain):
    """They hold the same, bit for bit."""
    for mine, other in zip(speculating.held(), plain.held(), strict=True):
        assert mine[:3] == other[:3]
        assert not other[3].isnan().any()
        assert torch.equal(mine[3], other[3]), mine[:3]


def live(sides, until, most_drafts, seed, boundaries=(), on_boundary=None):
    """Decode up to a position: one side with drafts, the other accepted tokens alone.

    Args:
        sides: The one that speculates, then the other.
        until: Position of the last rows' end.
        most_drafts: Of a step.
        seed: Of tokens and of what is accepted.
        boundaries: Positions at which each row begins a step.
        on_boundary: Called with a side and a row that begins a step there.

    Returns:
        Tokens taken back.
    """
    speculating, plain = sides
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = (GROUP + 2) * NUM_KV_HEADS, HEAD_SIZE
    taken_back = 0
    while (at := speculating.positions.tolist()) and min(at) < until:
        counts, accepted = [], []
        for row, position in enumerate(at):
            if position in boundaries:
                for side in sides:
                    on_boundary(side, row, position)
            left = [b - position for b in boundaries if b > position]
            counts.append(min([1 + draw.randint(0, most_drafts), *left]))
            accepted.append(draw.randint(1, counts[-1]))
        tokens = [torch.randn(n, *shape, generator=generator).mul(2) for n in counts]
        mine = speculating.decode(tokens)
        speculating.take_back([n - a for n, a in zip(counts, accepted, strict=True)])
        taken_back += sum(counts) - sum(accepted)
        # As vLLM decodes without speculation: a step for each token, not all rows.
        for row, stay in enumerate(accepted):
            for token in range(stay):
                alone = [tokens[row][token : token + 1]]
                (output,) = one_row(plain, row).decode(alone)
                assert torch.equal(output[0], mine[row][token])
                plain.positions[row] += 1
        compare(*sides)
    return taken_back


def one_row(side, row):
    """The same pages, one row alone."""
    alone = Side.__new__(Side)
    alone.__dict__.update(side.__dict__)
    only = slice(row, row + 1)
    for name in ("blocks", "positions", "placements", "grown_at"):
        setattr(alone, name, getattr(side, name)[only])
    return alone


LAYOUTS = {
    "sum": params_of(),
    "mean": params_of(mean=True),
    "decay": params_of(decay=0.9),
    "newest query only": params_of(decay=0.0, sinks=0),
    "softcap": params_of(softcap=5.0),
    "streaming": params_of(heavy_slots=4, recent_slots=44),
    "window alone": params_of(heavy_slots=0, recent_slots=48, sinks=0),
    "a page is split": params_of(heavy_slots=13, recent_slots=3, sinks=2),
    "blocks of 48": params_of(block_size=48, heavy_slots=48, recent_slots=48),
}


SLOW = pytest.mark.slow
OF_REFERENCE = [
    pytest.param(reference, 1, name, quantized, marks=[] if quick else SLOW)
    for name, quantized, quick in (
        *(("sum", False, True), ("a page is split", True, True)),
        *(("mean", True, False), ("streaming", False, False), ("decay", True, False)),
    )
]
OF_C = [
    pytest.param(cpu, number, name, quantized)
    for number in THREADS
    for name in LAYOUTS
    for quantized in (False, True)
]


@pytest.mark.parametrize(
    ("kernel", "number", "name", "quantized"), [*OF_REFERENCE, *OF_C]
)
@pytest.mark.rule("R26")
def test_pages_are_those_without_refused_drafts(kernel, number, name, quantized):
    """From before the budget to twice around the ring, rings shorter than drafts too.

    The outputs are those that each accepted token would have got alone.
    """
    sides = [
        Side(kernel, LAYOUTS[name], torch.float32, quantized, (0, 0, 0))
        for _ in range(2)
    ]
    until = 2 * LAYOUTS[name].layout.budget + 10
    with threads(number):
        assert live(sides, until, most_drafts=4, seed=len(name)) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "number"), KERNELS[::2])
def test_other_types(kernel, number, dtype):
    sides = [Side(kernel, params_of(), dtype, False, (0, 0)) for _ in range(2)]
    with threads(number):
        assert live(sides, 100, most_drafts=3, seed=1) > 20


@pytest.mark.parametrize(
    ("kernel", "number", "quantized"),
    [
        pytest.param(reference, 1, False, marks=SLOW),
        pytest.param(reference, 1, True, marks=SLOW),
        *(
            (cpu, number, quantized)
            for number in THREADS
            for quantized in (False, True)
        ),
    ],
)
def test_budgets_by_head_that_grow(kernel, number, quantized):
    """In pages of other layers; steps begin where heads part and budgets grow."""
    splits = [[[2, 5, 1], [5, 1, 3], [2, 3, 5]], [[3, 6, 1], [6, 3, 5], [3, 3, 6]]]
    budgets, sides = [3, 4], []
    for _ in range(2):
        params = params_of(mean=True)
        side = Side(kernel, params, torch.float32, quantized, (0,))
        others = [
            Side(kernel, params, torch.float32, quantized, (0,)).pages for _ in range(2)
        ]
        own = PlacementTable(
            [side.pages, *others], params.layout, most_blocks=[6] * 3, capacity=3
        )
        put_growing(own, splits, budgets)
        side.params = replace(params, placements=own.parts()[0])
        side.blocks = torch.tensor([[7, 3, 11, 1]], dtype=torch.int32)
        sides.append(side)

    def on_boundary(side, row, position):
        if position == 48:
            part_in_place(kernel, side.pages, side.blocks[row, :3], 1, side.params)
            side.placements[row] = 1
            return
        held = Held(side.blocks[row], 1, position, int(side.grown_at[row]))
        kernel.order_rings([ScoredLayer(side.pages, {}, side.params)], held)
        side.placements[row], side.grown_at[row] = 2, position

    with threads(number):
        taken_back = live(sides, 220, 4, 3, (48, 100), on_boundary)
    assert taken_back > 20


@pytest.mark.parametrize(("kernel", "number"), KERNELS)
def test_rows_that_stay_dense_and_padding_have_nothing_to_take_back(kernel, number):
    """Their pages may be others' too: no query scores, no attention is written."""
    side = Side(kernel, params_of(), torch.float32, False, (0, 0, 0))
    side.positions[1] = -1
    generator, attention = torch.Generator().manual_seed(0), side.pages.attention
    before = attention.clone()
    shape = (GROUP + 2) * NUM_KV_HEADS, HEAD_SIZE
    tokens = [torch.randn(n, *shape, generator=generator) for n in (4, 1, 2)]
    rows = side.rows
    side.rows = lambda **more: replace(
        rows(**more), first_queries=torch.tensor([48, 48, 48])
    )
    with threads(number):
        outputs = side.decode(tokens)
        side.take_back([2, 0, 1])
    assert not outputs[0].isnan().any() and not outputs[1].any()
    assert torch.equal(attention.nan_to_num(7), before.nan_to_num(7))
