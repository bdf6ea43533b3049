"""Every decode kernel against the torch reference."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.pairs import in_pairs
from vllm_h2o.attention.ops import (
    Held,
    LayerParams,
    ResidentRows,
    ScoredLayer,
    cpu,
    reference,
)
from vllm_h2o.attention.ops.cpu import library as c_library
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import SlotLayout, state_bytes
from vllm_h2o.policy.merging import NO_THRESHOLD
from vllm_h2o.policy.methods import Mean, Sum
from vllm_h2o.policy.placement import Placement, lend_by_budget
from vllm_h2o.policy.selection import select_residents

NUM_BLOCKS = 24


THREADS = (1, 3)
"""Rows and heads are shared out among threads, which change nothing."""


@contextmanager
def threads(number):
    """Have torch, and so the kernels, use so many, whatever the process has."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_kernel(number, *arguments):
    """Run the kernel with so many threads."""
    with threads(number):
        return run(cpu.decode_resident, *arguments)


def make_cache(dtype, num_kv_heads, head_size, block_size):
    """Pages full of NaN, so that reading what nobody wrote shows."""
    item = torch.empty(0, dtype=dtype).element_size()
    page = num_kv_heads * block_size * 2 * head_size * item
    page += state_bytes(
        num_kv_heads, block_size, page_floats=head_size + block_size + 1
    )
    raw = torch.full((NUM_BLOCKS * page // item,), float("nan"), dtype=dtype)
    return raw.as_strided(
        (NUM_BLOCKS, num_kv_heads, block_size, 2 * head_size),
        (page // item, block_size * 2 * head_size, 2 * head_size, 1),
    )


def pages_of(cache, params, quantized=False):
    options = {"merges": params.merge, "reads_part": params.read < 1.0}
    if quantized:  # in blocks that are longer than their only page
        cut = BlockCut(1, 1, 1, cache.stride(0) * cache.element_size())
        return Pages.view_cut(cache, cache.shape[2], cut, **options, quantized=True)
    pages = Pages.view(cache, **options)
    if params.merge:
        pages.thresholds.fill_(NO_THRESHOLD)
    return pages


def run(
    op, params, dtype, heads, head_size, steps, quantized=False, mixed_starts=(0, 5)
):
    """Decode `steps` tokens of some rows; return outputs and the cache."""
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(dtype, num_kv_heads, head_size, params.layout.block_size)
    pages = pages_of(cache, params, quantized)
    num_rows = len(mixed_starts)
    blocks = torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1
    width = params.layout.budget_blocks
    table = blocks[: num_rows * width].view(num_rows, width).int()
    outputs = []
    for step in range(steps):
        # Rows join late, so that each step mixes lengths.
        active = [row for row in range(num_rows) if step >= mixed_starts[row]]
        positions = torch.tensor([step - mixed_starts[row] for row in active])
        first_queries = positions.minimum(torch.tensor([3 * row for row in active]))
        rows = ResidentRows(table[active], positions, first_queries)
        shape = (len(active), num_heads, head_size)
        query = torch.randn(shape, generator=generator).mul(2).to(dtype)
        shape = (len(active), num_kv_heads, head_size)
        key = torch.randn(shape, generator=generator).to(dtype)
        value = torch.randn(shape, generator=generator).to(dtype)
        output = torch.full_like(query, float("nan"))
        op(query, key, value, pages, rows, params, output)
        outputs.append(output)
    return torch.cat(outputs), pages, table


def params_of(
    unit="token",
    mean=False,
    decay=1.0,
    softcap=0.0,
    sinks=4,
    read=1.0,
    merge=False,
    **slots,
):
    slots = {"block_size": 16, "heavy_slots": 32, "recent_slots": 16} | slots
    layout = SlotLayout(sinks=sinks, whole_blocks=unit == "block", **slots)
    method = Mean(decay) if mean else Sum(decay)
    return LayerParams(layout, 0.17, softcap, method, read=read, merge=merge)


CASES = {
    "sum": params_of(),
    "mean": params_of(mean=True),
    "decay": params_of(decay=0.9),
    "newest query only": params_of(decay=0.0, sinks=0),
    "softcap": params_of(softcap=5.0),
    "block": params_of(unit="block"),
    "block mean": params_of(unit="block", mean=True, sinks=0),
    "streaming": params_of(heavy_slots=4, recent_slots=44),
    "window alone": params_of(heavy_slots=0, recent_slots=48, sinks=0),
    "blocks of 32": params_of(block_size=32, heavy_slots=32, recent_slots=32),
    "reads a part": params_of(mean=True, heavy_slots=80, read=0.5),
    "reads a part, decay": params_of(decay=0.9, sinks=0, heavy_slots=80, read=0.3),
    "reads a part, block": params_of(unit="block", heavy_slots=80, read=0.5),
    "merges": params_of(mean=True, merge=True),
    "merges, window alone": params_of(
        heavy_slots=0, recent_slots=48, sinks=0, merge=True
    ),
    "blocks of 48": params_of(block_size=48, heavy_slots=48, recent_slots=48),
}


CHECK = pytest.mark.check


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "heads", [pytest.param((9, 3), marks=CHECK), (4, 4), (8, 1), (10, 2)]
)
@pytest.mark.rule("R9")
def test_kernel_equals_reference(name, heads):
    params = CASES[name]
    arguments = (params, torch.float32, heads, 64, 130)
    expected, expected_pages, table = run(reference.decode_resident, *arguments)
    used = table.flatten().long()
    for number in THREADS:
        actual, pages, _ = run_kernel(number, *arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(pages.births[used], expected_pages.births[used])
        torch.testing.assert_close(
            pages.attention[used], expected_pages.attention[used], rtol=1e-4, atol=1e-6
        )
        if params.merge:
            torch.testing.assert_close(
                pages.values[used], expected_pages.values[used], rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(pages.thresholds, expected_pages.thresholds)


@in_pairs(
    "dtype, heads, name",
    [torch.float32, torch.bfloat16, torch.float16],
    [pytest.param((9, 3), marks=CHECK), (10, 2)],
    ["mean", "decay", "softcap", "streaming", "reads a part", "blocks of 48"],
)
def test_int8_equals_reference(name, dtype, heads):
    """Its bytes too: both round once, and alike."""
    arguments = (CASES[name], dtype, heads, 80, 130, True)
    expected, expected_pages, table = run(reference.decode_resident, *arguments)
    used = table.flatten().long()
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1.6e-2, 4e-3)
    for number in THREADS:
        actual, pages, _ = run_kernel(number, *arguments)
        assert pages.keys.dtype == torch.int8
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        for part in ("keys", "values", "key_scales", "value_scales", "births"):
            ours, theirs = getattr(pages, part)[used], getattr(expected_pages, part)
            torch.testing.assert_close(ours, theirs[used], equal_nan=True)
        torch.testing.assert_close(
            pages.attention[used], expected_pages.attention[used], rtol=1e-4, atol=1e-6
        )


SINKS = torch.tensor([-2.0, 0.0, 8.0, 50.0, -300.0, 1.5, 3.0, 0.5, -1.0, 300.0])
"""Also such as leave nothing to the tokens, or all."""


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (10, 2)])
@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        *(("mean", False), ("softcap", False), ("reads a part", False)),
        *(("merges", False), ("mean", True), ("reads a part", True)),
    ],
)
def test_sinks_take_attention_and_give_nothing(name, quantized, heads):
    params = replace(CASES[name], sink_logits=SINKS[: heads[0]].clone())
    arguments = (params, torch.float32, heads, 64, 130, quantized)
    expected, expected_pages, table = run(reference.decode_resident, *arguments)
    used = table.flatten().long()
    actual, pages, _ = run_kernel(3, *arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(pages.births[used], expected_pages.births[used])
    torch.testing.assert_close(
        pages.attention[used], expected_pages.attention[used], rtol=1e-4, atol=1e-6
    )
    without, *_ = run_kernel(3, CASES[name], *arguments[1:])
    assert not torch.allclose(actual, without, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_near_what_it_rounds(dtype):
    # Before anything competes the same tokens are there, each within half a step.
    arguments = (params_of(mean=True), dtype, (9, 3), 64, 40)
    exact, exact_pages, table = run(reference.decode_resident, *arguments)
    rounded, pages, _ = run(reference.decode_resident, *arguments, True)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1)
    assert not torch.equal(rounded, exact)
    used = table.flatten().long()[[0, 1, 3, 4]]
    for steps, scales, exact in (
        (pages.values, pages.value_scales[..., None], exact_pages.values),
        (pages.keys, pages.key_scales[:, :, None], exact_pages.keys),
    ):
        error = (steps.float() * scales - exact.float())[used].abs()
        assert (error <= 0.51 * scales[used]).all()
        assert (error > 0.3 * scales[used]).any()


@pytest.mark.parametrize("bad", [0.0, 1e-44, float("nan"), float("inf")])
def test_int8_of_odd_vectors_equals_reference(bad):
    """Zeros, what is too small to be divided, and what no type holds."""
    results = []
    for op in (reference.decode_resident, cpu.decode_resident):
        generator = torch.Generator().manual_seed(1)
        params = params_of()
        pages = pages_of(make_cache(torch.float32, 3, 64, 16), params, True)
        table = torch.tensor([[7, 3, 11]], dtype=torch.int32)
        for position in range(3):
            query, key, value = torch.randn(3, 1, 3, 64, generator=generator)
            if position == 1:
                key[0, 1, 5], value[0, 2] = bad, bad
                key[0, 0], value[0, 0, 5] = bad, bad
            rows = ResidentRows(table, torch.tensor([position]), torch.tensor([0]))
            output = torch.empty_like(query)
            op(query, key, value, pages, rows, params, output)
        parts = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
        results.append([output, *(part[7] for part in parts)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)
    head = results[0][0][0, 2]
    assert head.isfinite().all() == (bad < 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "head_size", [pytest.param(64, marks=CHECK), 80, 112, 128, 512]
)
def test_half_precision(dtype, head_size):
    arguments = (params_of(), dtype, (6, 2), head_size, 80)
    expected, expected_pages, table = run(reference.decode_resident, *arguments)
    used = table.flatten().long()
    for number in THREADS:
        actual, pages, _ = run_kernel(number, *arguments)
        torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=4e-3)
        assert torch.equal(pages.births[used], expected_pages.births[used])
        # Scores are float32 whatever the cache is.
        torch.testing.assert_close(
            pages.attention[used], expected_pages.attention[used], rtol=1e-4, atol=1e-6
        )


def test_other_blocks_stay_untouched():
    for number in THREADS:
        arguments = (params_of(), torch.float32, (9, 3), 64, 100)
        _, pages, table = run_kernel(number, *arguments)
        others = sorted(set(range(NUM_BLOCKS)) - set(table.flatten().tolist()))
        assert pages.keys[others].isnan().all()
        assert pages.attention[others].isnan().all()


def test_unsupported_shapes_are_named():
    with pytest.raises(ValueError, match="--dtype"):
        cpu.check_supported(torch.float64, 64, 16)
    with pytest.raises(ValueError, match="--block-size"):
        cpu.check_supported(torch.float32, 64, 8)


def placements_of(pages_of_layers, layer, blocks):
    """Budgets by head over the pages of three layers, heads of 1 to 5 blocks."""
    config = H2OConfig(sinks=4)
    layout = SlotLayout.of_blocks(config, 16, 3)
    placement = Placement.of_blocks(blocks, 3, config, 16)
    return PlacementTable.of(pages_of_layers, layout, placement).parts()[layer]


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    ("read", "merge", "quantized"),
    [(1.0, False, False), (0.5, False, False), (1.0, True, False), (0.5, False, True)],
)
@pytest.mark.rule("R12")
def test_budgets_by_head_equal_reference(layer, read, merge, quantized):
    """From the step that fills the common budget on, in borrowed pages."""
    (expected, expected_births), *results = (
        decode_by_head(kernel, number, layer, read, merge, quantized)
        for kernel, number in ((reference, 1), *((cpu, n) for n in THREADS))
    )
    for actual, births in results:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(births, expected_births)


def decode_by_head(kernel, number, layer, read, merge, quantized):
    """Attention of one of three layers, step by step, and the births of all."""
    blocks = [[2, 5, 1], [5, 1, 3], [2, 3, 5]]
    dtype, budget = torch.float32, 48
    with threads(number):
        generator = torch.Generator().manual_seed(layer)
        caches = [make_cache(dtype, 3, 64, 16) for _ in blocks]
        params = params_of(
            mean=True, recent_slots=16, heavy_slots=32, read=read, merge=merge
        )
        layers = [pages_of(cache, params, quantized) for cache in caches]
        params = replace(
            params,
            placements=placements_of(layers, layer, blocks),
        )
        table = torch.tensor([[7, 3, 11]], dtype=torch.int32)
        outputs = []
        for position in range(150):
            shape = (1, 9, 64)
            query = torch.randn(shape, generator=generator).mul(2)
            key, value = torch.randn((2, 1, 3, 64), generator=generator)
            output = torch.full_like(query, float("nan"))
            placement = BY_HEAD if position >= budget else UNIFORM
            rows = ResidentRows(
                table,
                torch.tensor([position]),
                torch.tensor([0]),
                placements=torch.tensor([placement], dtype=torch.int32),
            )
            if position == budget:
                scores = layers[layer].attention[table[0].long()]
                scores = scores.transpose(0, 1).flatten(1)
                config = H2OConfig(sinks=4, pooling=1)
                scored = [ScoredLayer(layers[layer], {"attention": scores}, params)]
                held = Held(table[0], BY_HEAD, position)
                kernel.transition(scored, table[0], held, 0, config)
            kernel.decode_resident(
                query, key, value, layers[layer], rows, params, output
            )
            outputs.append(output)
        births = torch.cat([pages.births[[7, 3, 11]] for pages in layers])
        return torch.cat(outputs), births


@pytest.mark.parametrize(("read", "merge"), [(1.0, False), (0.5, False), (1.0, True)])
def test_requests_with_splits_of_their_own_decode_side_by_side(read, merge):
    """One whose heads are alike and two that split differently: each as alone."""
    expected = decode_splits(reference, read, merge)
    for number in THREADS:
        with threads(number):
            together = decode_splits(cpu, read, merge)
            apart = decode_splits(cpu, read, merge, apart=True)
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(together, apart)


def decode_splits(kernel, read, merge, apart=False):
    """`[steps, 3 rows, 9, 64]` attention of the first of three layers."""
    splits = [[2, 5, 1], [5, 1, 3], [2, 3, 5]], [[4, 1, 3], [1, 5, 3], [4, 3, 3]]
    params = params_of(
        mean=True, recent_slots=16, heavy_slots=32, read=read, merge=merge
    )
    caches = [make_cache(torch.float32, 3, 64, 16) for _ in splits[0]]
    layers = [pages_of(cache, params) for cache in caches]
    own = PlacementTable(layers, params.layout, most_blocks=[5] * 3, capacity=3)
    for index, blocks in enumerate(splits, 1):
        own.put(index, Placement.of_blocks(blocks, 3, H2OConfig(sinks=4), 16))
    params = replace(params, placements=own.parts()[0])
    blocks = torch.tensor([[7, 3, 11], [1, 9, 4], [2, 6, 5]], dtype=torch.int32)
    generator, outputs = torch.Generator().manual_seed(5), []
    for position in range(150):
        if position == params.layout.budget:
            for index in (1, 2):
                part_in_place(kernel, layers[0], blocks[index], index, params)
        query = torch.randn(3, 9, 64, generator=generator).mul(2)
        key, value = torch.randn(2, 3, 3, 64, generator=generator)
        output = torch.full_like(query, float("nan"))
        switched = position >= params.layout.budget
        placements = torch.arange(3, dtype=torch.int32) * switched
        for i in torch.arange(3).split(1 if apart else 3):
            at, never = torch.full((len(i),), position), torch.zeros(len(i)).long()
            rows = ResidentRows(blocks[i], at, never, placements=placements[i])
            part = torch.empty_like(query[i])
            kernel.decode_resident(
                query[i], key[i], value[i], layers[0], rows, params, part
            )
            output[i] = part
        outputs.append(output)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("read", "merge", "quantized"),
    [(1.0, False, False), (0.5, False, False), (1.0, True, False), (0.5, False, True)],
)
def test_a_budget_that_grows_equals_reference(read, merge, quantized):
    """Twice, in borrowed pages, beside a request that has its budget for good."""
    expected = decode_growing(reference, read, merge, quantized)
    for number in THREADS:
        with threads(number):
            actual = decode_growing(cpu, read, merge, quantized)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(actual[1], expected[1])


def test_a_budget_that_grows_to_the_engines_equals_reference():
    """Where all heads have the same."""
    params = params_of(mean=True, recent_slots=16, heavy_slots=32)
    results = []
    for kernel in (reference, cpu):
        pages = pages_of(make_cache(torch.float32, 3, 64, 16), params)
        table = PlacementTable([pages], params.layout, most_blocks=[3], capacity=3)
        smaller = Placement.alike((1, 3), [2], H2OConfig(sinks=4), 16)
        table.put(2, smaller)
        table.grows_from(smaller.budget)
        own = replace(params, placements=table.parts()[0])
        blocks = torch.tensor([[7, 3, 11]], dtype=torch.int32)
        generator, outputs = torch.Generator().manual_seed(5), []
        for position in range(120):
            if position == 70:
                layer = ScoredLayer(pages, {}, own)
                kernel.order_rings([layer], Held(blocks[0], 2, position))
            grown = torch.tensor([70 * (position >= 70)])
            index = torch.tensor([2 if position < 70 else UNIFORM], dtype=torch.int32)
            query = torch.randn(1, 9, 64, generator=generator).mul(2)
            key, value = torch.randn(2, 1, 3, 64, generator=generator)
            at, never = torch.tensor([position]), torch.tensor([0])
            rows = ResidentRows(blocks, at, never, placements=index, grown_at=grown)
            output = torch.full_like(query, float("nan"))
            kernel.decode_resident(query, key, value, pages, rows, own, output)
            outputs.append(output)
        results.append((torch.cat(outputs), pages.births[blocks[0].long()]))
    (expected, births), (actual, actual_births) = results
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual_births, births)


def decode_growing(kernel, read, merge, quantized):
    """`[steps, 2 rows, 9, 64]` attention of the first of three layers, and births."""
    splits = [
        [[2, 5, 1], [5, 1, 3], [2, 3, 5]],
        [[3, 6, 1], [6, 3, 5], [3, 3, 6]],
        [[7, 6, 3], [6, 7, 7], [5, 5, 8]],
    ]
    budgets, grows_at = [3, 4, 6], [100, 180]
    params = params_of(
        mean=True, recent_slots=16, heavy_slots=32, read=read, merge=merge
    )
    caches = [make_cache(torch.float32, 3, 64, 16) for _ in splits[0]]
    layers = [pages_of(cache, params, quantized) for cache in caches]
    own = PlacementTable(layers, params.layout, most_blocks=[8] * 3, capacity=4)
    put_growing(own, splits, budgets)
    params = replace(params, placements=own.parts()[0])
    blocks = torch.tensor([[7, 3, 11, 1, 9, 4], [2, 6, 5, 0, 0, 0]], dtype=torch.int32)
    index, grown_at = torch.zeros(2, dtype=torch.int32), torch.zeros(2).long()
    generator, outputs = torch.Generator().manual_seed(5), []
    for position in range(240):
        if position == params.layout.budget:
            index += 1
            for row in blocks:
                part_in_place(kernel, layers[0], row[:3], 1, params)
        if position in grows_at:
            held = Held(blocks[0], int(index[0]), position, int(grown_at[0]))
            kernel.order_rings([ScoredLayer(layers[0], {}, params)], held)
            index[0], grown_at[0] = index[0] + 1, position
        query = torch.randn(2, 9, 64, generator=generator).mul(2)
        key, value = torch.randn(2, 2, 3, 64, generator=generator)
        at, never = torch.full((2,), position), torch.zeros(2).long()
        rows = ResidentRows(blocks, at, never, placements=index, grown_at=grown_at)
        output = torch.full_like(query, float("nan"))
        kernel.decode_resident(query, key, value, layers[0], rows, params, output)
        outputs.append(output)
    held = [7, 3, 11, 1, 9, 4, 2, 6, 5]
    return torch.stack(outputs), torch.stack([pages.births[held] for pages in layers])


def put_growing(table, splits, budgets):
    """Placements at 1, 2 .. of blocks by layer and head, each grown from the last."""
    lent, before = lend_by_budget(splits, budgets), None
    for index, (blocks, budget) in enumerate(zip(splits, budgets, strict=True), 1):
        placement = Placement.of_blocks(blocks, budget, H2OConfig(sinks=4), 16)
        pages = [
            [mine[:n] for mine, n in zip(heads, counts, strict=True)]
            for heads, counts in zip(lent, blocks, strict=True)
        ]
        before = replace(placement, pages=pages, grown_from=before)
        table.put(index, before)


def part_in_place(kernel, pages, blocks, index, params):
    """A request has filled the budget: its heads get their own slots."""
    scores = pages.attention[blocks.long()].transpose(0, 1).flatten(1)
    layer = ScoredLayer(pages, {"attention": scores}, params)
    config = H2OConfig(sinks=4, pooling=1)
    kernel.transition([layer], blocks, Held(blocks, index), 0, config)


@pytest.mark.parametrize(("position", "placement"), [(47, UNIFORM), (199, BY_HEAD)])
def test_heads_are_chosen_for_together_as_each_alone(position, placement):
    """Heads 0 and 2 are poor: no spans for them, whatever the others get."""
    blocks = [[2, 5, 1, 3], [4, 1, 5, 3]]
    config = H2OConfig(sinks=4, pooling=7, score="sum")
    pages = [Pages.view(make_cache(torch.float32, 4, 64, 16)) for _ in blocks]
    params = replace(params_of(), placements=placements_of(pages, 0, blocks))
    scores = torch.rand(4, position + 1)
    kept = reference.select({"attention": scores}, placement, 0, config, params)
    layouts = params.layouts_of(placement, 4)
    for head, layout in enumerate(layouts):
        pooling = 1 if layout.budget < 48 else 7
        mine = scores[head : head + 1]
        positions, slots = select_residents(mine, pooling, layout)
        held = kept.positions[head] >= 0
        assert torch.equal(kept.positions[head, held], positions[0])
        assert torch.equal(kept.slots[head, held], slots)
        assert (kept.slots[head, ~held] == -1).all()


@pytest.mark.parametrize("op", [reference.decode_resident, cpu.decode_resident])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.rule("R9")
def test_a_tie_is_lost_by_who_leaves_the_window(op, quantized):
    """One that has the least more takes the slot of the oldest that is no sink."""
    params, table = params_of(), torch.tensor([[7, 3, 11]], dtype=torch.int32)
    query, key = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    for more, beats in ((0.0, None), (1e-6, 4)):
        pages = pages_of(make_cache(torch.float32, 3, 64, 16), params, quantized)
        held = table[0].long()
        for name in ("keys", "values", "key_scales", "value_scales")[
            : 2 + 2 * quantized
        ]:
            getattr(pages, name)[held] = 0
        pages.attention[held] = 1.0
        pages.attention[held[2], :, 0] += more
        pages.births[held] = torch.arange(48, dtype=torch.int32).view(3, 1, 16)
        rows = ResidentRows(table, torch.tensor([48]), torch.tensor([0]))
        op(query, key, key, pages, rows, params, torch.empty_like(query))
        expected = torch.arange(48)
        expected[32] = 48
        if beats is not None:
            expected[beats] = 32
        for head in pages.births[held].transpose(0, 1).flatten(1):
            assert head.tolist() == expected.tolist()


def test_padding_touches_no_page():
    pages = Pages.view(make_cache(torch.float32, 3, 64, 16))
    rows = ResidentRows(
        torch.tensor([[0, 0, 0], [7, 3, 11]], dtype=torch.int32),
        torch.tensor([-1, 0]),
        torch.tensor([0, 0]),
    )
    query, key = torch.randn(2, 9, 64), torch.randn(2, 3, 64)
    output = torch.full_like(query, float("nan"))
    cpu.decode_resident(query, key, key, pages, rows, params_of(), output)
    assert output[0].eq(0).all() and output[1].isfinite().all()
    assert pages.keys[:7].isnan().all() and pages.attention[:7].isnan().all()


def test_before_its_first_query_a_row_leaves_all_scores_alone():
    """Rows that stay dense share pages."""
    params, dtype = params_of(), torch.float32
    shared, own = 5, (9, 2)
    results = []
    for op in (reference.decode_resident, cpu.decode_resident):
        generator = torch.Generator().manual_seed(1)
        pages = Pages.view(make_cache(dtype, 3, 64, 16))
        filled = [shared, *own]
        for part in (pages.keys, pages.values):
            part[filled] = torch.randn(part[filled].shape, generator=generator)
        rows = ResidentRows(
            torch.tensor([[shared, block, 0] for block in own], dtype=torch.int32),
            torch.tensor([20, 30]),
            torch.tensor([48, 48]),
        )
        query = torch.randn(2, 9, 64, generator=generator)
        key, value = torch.randn(2, 2, 3, 64, generator=generator)
        output = torch.full_like(query, float("nan"))
        op(query, key, value, pages, rows, params, output)
        results.append((output, pages))
    (expected, expected_pages), (actual, pages) = results
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert pages.attention.isnan().all()
    for name in ("keys", "values", "births"):
        torch.testing.assert_close(
            getattr(pages, name), getattr(expected_pages, name), equal_nan=True
        )


def test_a_compiler_without_float16_lacks_nothing_else(monkeypatch):
    library = c_library.load("-U__FLT16_MANT_DIG__", "-O0")
    monkeypatch.setattr(cpu, "_library", lambda quantized=False: library)
    cpu.build(torch.bfloat16)
    with pytest.raises(ValueError, match=r"without float16 \(--dtype\).*gcc 12"):
        cpu.build(torch.float16)
