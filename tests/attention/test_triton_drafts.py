"""Drafts in Triton: several tokens of a row in turn, and refused ones taken back."""

from dataclasses import replace

import pytest
import torch

from tests.attention import triton_heads
from tests.attention.test_take_back import held_slots
from tests.attention.triton_checks import TOLERANCE
from tests.attention.triton_state import clone, make_step, params_of
from vllm_h2o.attention.ops import DraftLog, LoggedLayer, ResidentRows, reference
from vllm_h2o.attention.ops.triton import decode_resident, draft_log, take_back
from vllm_h2o.attention.placements import BY_HEAD

COUNTS, REFUSED = [4, 1, 3, 4], [2, 0, 2, 3]


def some_tokens(counts, heads, head_size, dtype, seed=3):
    """Queries, keys and values of so many tokens of each row."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    shapes = [(sum(counts), n, head_size) for n in (num_heads, num_kv_heads)]
    query = torch.randn(shapes[0], generator=generator).mul(2).to(dtype)
    both = torch.randn(2, *shapes[1], generator=generator).to(dtype)
    return query, *both


def with_counts(rows, counts, apart=None):
    """Rows with so many tokens each, which begin as if each had `apart`."""
    counts, apart = torch.tensor(counts), torch.tensor(apart or counts)
    starts = apart.cumsum(0) - apart
    most = int(counts.max())
    return replace(rows, counts=counts.int(), starts=starts.int(), most_tokens=most)


def check_drafts(pages, rows, params, tokens, counts, refused, others=()):
    """Outputs are the reference's; what is taken back leaves no trace.

    Args:
        pages: The layer's.
        rows: They are about to decode.
        params: The layer's.
        tokens: Queries, keys and values of them.
        counts: Tokens of each row.
        refused: Of these.
        others: Pages that the layer borrows from.

    Returns:
        `DraftLog.losers` of all drafts.
    """
    query, key, value = tokens
    all_pages = [pages, *others]

    def run(operation, counts_now, log=None):
        output = torch.full_like(query, float("nan"))
        now = with_counts(rows, counts_now, counts)
        operation(query, key, value, pages, now, params, output, log)
        return output

    before = [clone(layer) for layer in all_pages]

    def restore():
        for layer, saved in zip(all_pages, before, strict=True):
            layer.keys.untyped_storage().copy_(saved.keys.untyped_storage())

    most = max(counts) - 1
    by_row = DraftLog.by_row(pages, params, len(counts), most)
    expected = run(reference.decode_resident, counts, by_row)
    expected_held = [*held_slots(pages, replace_positions(rows, counts), params)]
    restore()
    slots = len(counts) * pages.keys.shape[1] * params.largest_budget
    log = draft_log(pages, len(counts), most, slots)
    actual = run(decode_resident, counts, log)
    torch.testing.assert_close(actual, expected, **TOLERANCE[query.dtype])
    compare(held_slots(pages, replace_positions(rows, counts), params), expected_held)
    refused_now = torch.tensor(refused, dtype=torch.int32)
    take_back([LoggedLayer(pages, params, log)], with_counts(rows, counts), refused_now)
    stay = [n - gone for n, gone in zip(counts, refused, strict=True)]
    after = replace_positions(rows, stay)
    found = [*held_slots(pages, after, params)]
    restore()
    run(decode_resident, stay)
    for mine, other in zip(found, held_slots(pages, after, params), strict=True):
        assert mine[:3] == other[:3]
        assert torch.equal(mine[3], other[3]), mine[:3]
    return log.losers


def replace_positions(rows, counts):
    """The rows after so many tokens of each."""
    return replace(rows, positions=rows.positions + torch.tensor(counts))


def compare(actual, expected):
    """What is held is the same; attention but for rounding."""
    for mine, other in zip(actual, expected, strict=True):
        assert mine[:3] == other[:3]
        if mine[2] == "attention":
            torch.testing.assert_close(mine[3], other[3], rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(mine[3], other[3]), mine[:3]


CASES = {
    "sum": params_of(),
    "mean, decay": params_of(mean=True, decay=0.9),
    "streaming": params_of(heavy_slots=4, recent_slots=44),
    "a page is split": params_of(heavy_slots=13, recent_slots=3, sinks=2),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        *(("sum", False), ("a page is split", True), ("streaming", False)),
        *(pytest.param(name, True, marks=SLOW) for name in ("sum", "streaming")),
        *(
            pytest.param("mean, decay", whether, marks=SLOW)
            for whether in (False, True)
        ),
        pytest.param("a page is split", False, marks=SLOW),
    ],
)
@pytest.mark.rule("R26")
def test_drafts_equal_reference_and_are_taken_back(name, quantized):
    """Rows below the budget, that come to it, that are past it."""
    params = CASES[name]
    budget = params.layout.budget
    positions = [budget - 2, 5, budget - 1, budget + 37]
    step = make_step(params, positions, heads=(6, 2), quantized=quantized)
    tokens = some_tokens(COUNTS, (6, 2), 64, torch.float32)
    losers = check_drafts(step.pages, step.rows, params, tokens, COUNTS, REFUSED)
    assert (losers[3] >= 0).any() == (name != "streaming")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafts_of_other_types(dtype):
    params = params_of(mean=True)
    step = make_step(params, [60, 47], dtype, (3, 1), 80)
    tokens = some_tokens([3, 2], (3, 1), 80, dtype)
    check_drafts(step.pages, step.rows, params, tokens, [3, 2], [2, 1])


@pytest.mark.parametrize("layer", [0, 1])
def test_drafts_by_head(layer):
    """In borrowed pages."""
    counts, refused = [4, 3], [3, 1]
    layers, table = triton_heads.make_layers(torch.float32, 64, 16, 2)
    params = triton_heads.params_of(layers, layer, 16)
    at, zero = torch.tensor([90, 60]), torch.zeros(2).long()
    index = torch.full((2,), BY_HEAD, dtype=torch.int32)
    rows = ResidentRows(table, at, zero, placements=index, grown_at=zero)
    tokens = some_tokens(counts, (6, 2), 64, torch.float32)
    others = [pages for i, pages in enumerate(layers) if i != layer]
    losers = check_drafts(layers[layer], rows, params, tokens, counts, refused, others)
    assert (losers[0] >= 0).any()


def test_rows_that_stay_dense_and_padding():
    """Nothing is noted, and nothing undone."""
    params = params_of()
    step = make_step(params, [20, 5, 30], heads=(2, 1))
    rows = replace(step.rows, first_queries=torch.tensor([48, 48, 48]))
    rows.positions[1] = -1
    counts = [3, 1, 2]
    query, key, value = some_tokens(counts, (2, 1), 64, torch.float32)
    log = draft_log(step.pages, 3, 2, 3 * params.largest_budget)
    log.attention.fill_(7.0)
    output = torch.full_like(query, float("nan"))
    now, attention = with_counts(rows, counts), step.pages.attention.clone()
    decode_resident(query, key, value, step.pages, now, params, output, log)
    refused = torch.tensor([2, 0, 1], dtype=torch.int32)
    take_back([LoggedLayer(step.pages, params, log)], now, refused)
    assert not output.isnan().any() and not output[3].any()
    assert torch.equal(attention.nan_to_num(7), step.pages.attention.nan_to_num(7))
    assert (log.attention == 7.0).all()
