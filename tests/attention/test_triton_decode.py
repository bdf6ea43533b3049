"""The Triton decode step against the torch reference."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.attention.triton_checks import TOLERANCE, check_step
from tests.attention.triton_state import (
    clone,
    content,
    make_step,
    params_of,
    rows_to,
)
from vllm_h2o.attention.ops import ResidentRows, reference
from vllm_h2o.attention.ops.triton import (
    check_supported,
    decode_resident,
    launch,
    splitting,
)
from vllm_h2o.attention.pages import Pages


def graduated(step, pages):
    """`[num_rows, num_kv_heads]`, whether the births in the heavy set changed."""
    heavy = step.params.layout.heavy_slots // step.params.layout.block_size
    blocks = step.rows.block_table[:, :heavy].long()
    before, after = step.pages.births[blocks], pages.births[blocks]
    return (before != after).any(dim=3).any(dim=1)


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
    "blocks of 48": params_of(
        unit="block", sinks=0, block_size=48, heavy_slots=48, recent_slots=48
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_step_equals_reference(name):
    """Rows that append, that fill their budget exactly, and that graduate."""
    params = CASES[name]
    budget, size = params.layout.budget, params.layout.block_size
    positions = [0, 5, budget - 1, budget, budget + size, budget + 37]
    step = make_step(params, positions, heads=(6, 2))
    blocks = step.rows.block_table[3].long()
    step.pages.attention[blocks[params.layout.heavy_slots // size], 0] = 0.0
    moved = graduated(step, check_step(step))[3:]
    # Both outcomes of the competition are met.
    assert moved.any() == (params.layout.pinned_slots < params.layout.heavy_slots)
    assert not moved.all()


@pytest.mark.parametrize("name", ["mean", "softcap", "streaming", "blocks of 32"])
def test_int8_step_equals_reference(name):
    """Bytes and scales too, of the new token and of what graduates."""
    params = CASES[name]
    budget, size = params.layout.budget, params.layout.block_size
    positions = [0, 5, budget - 1, budget, budget + size, budget + 37]
    step = make_step(params, positions, heads=(6, 2), quantized=True)
    moved = graduated(step, check_step(step))[3:]
    assert moved.any() == (params.layout.pinned_slots < params.layout.heavy_slots)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 5])
def test_sinks(group, dtype):
    """Of the model's type, as a graph holds them; in one split and in several."""
    sinks = torch.tensor([-2.0, 0.0, 8.0, 40.0, -300.0, 1.5, 3.0, 300.0, 2.0, -1.0])
    params = dataclasses.replace(
        params_of(mean=True), sink_logits=sinks[: 2 * group].to(dtype)
    )
    step = make_step(params, [0, 5, 47, 60], dtype, heads=(2 * group, 2))
    for num_splits in (1, 3):
        check_step(step, num_splits)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [80, 128])
def test_int8_of_head_sizes_and_dtypes(head_size, dtype):
    params = params_of(mean=True)
    check_step(make_step(params, [50], dtype, (2, 1), head_size, quantized=True))


def test_int8_of_small_values_in_float16():
    """Behind a token that gets most of the attention and has no value."""
    step = make_step(params_of(), [47], torch.float16, (1, 1), quantized=True)
    block = step.rows.block_table[0, 0].long()
    step.pages.value_scales.mul_(0.003)
    step.pages.value_scales[block, 0, 5] = 0.0
    step.pages.keys[block, 0, :, 5] = 127 * step.query[0, 0].sign().to(torch.int8)
    step.pages.key_scales[block, 0, 5] = 0.5 / 127
    step.value.mul_(0.003)
    expected, _ = step.run(reference.decode_resident, "cpu")
    actual, _ = step.run(decode_resident, scratch=step.scratch(3, 16))
    assert 0 < expected.abs().max() < 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("bad", [0.0, 1e-44, float("nan"), float("inf")])
def test_int8_of_odd_vectors_equals_reference(bad):
    """Zeros, what is too small to be divided, and what no type holds."""
    step = make_step(params_of(), [20, 60], heads=(4, 2), quantized=True)
    step.key[0, 1, 5], step.value[0, 1] = bad, bad
    step.key[1, 0], step.value[1, 0, 5] = bad, bad
    expected, expected_pages = step.run(reference.decode_resident, "cpu")
    actual, pages = step.run(decode_resident, scratch=step.scratch(3, 16))
    torch.testing.assert_close(actual, expected, equal_nan=True)
    for name in ("keys", "values", "key_scales", "value_scales"):
        ours, theirs = getattr(pages, name), getattr(expected_pages, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", [1, 3, 8, 11, 16, 31])
def test_grouped_query_heads(group):
    check_step(make_step(params_of(), [60], heads=(group, 1)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [64, 80, 128, 512])
def test_head_sizes_and_dtypes(head_size, dtype):
    check_step(make_step(params_of(mean=True), [50], dtype, (2, 1), head_size))


@pytest.mark.parametrize(("group", "head_size"), [(16, 512), (32, 256)])
def test_the_largest_outputs(group, head_size):
    check_step(make_step(params_of(), [60], heads=(group, 1), head_size=head_size))


@pytest.mark.parametrize("unit", ["token", "block"])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_block_sizes(size, unit):
    params = params_of(
        unit, sinks=0, block_size=size, heavy_slots=2 * size, recent_slots=size
    )
    step = make_step(params, [2 * size - 3, 4 * size], dtype=torch.float16)
    check_step(step, num_splits=2, tile_slots=64)


@pytest.mark.parametrize("num_splits", [1, 2, 48])
@pytest.mark.parametrize("tile_slots", [16, 64])
def test_splits_and_tiles(num_splits, tile_slots):
    """Also splits past the tokens of a row, and tiles past its budget."""
    check_step(make_step(params_of(), [3, 60]), num_splits, tile_slots)


def test_tiles_of_scores(monkeypatch):
    """Scores are updated tile by tile; the graduate and its slot in two of them."""
    monkeypatch.setattr(launch, "SCORE_TILE", 16)
    check_step(make_step(params_of(), [55, 59, 64]))
    check_step(make_step(params_of("block"), [48, 57]))


def test_steps_follow_each_other():
    """What a step leaves is what the next one needs."""
    params = params_of(mean=True, decay=0.9)
    step = make_step(params, [46, 62], heads=(2, 2))
    for _ in range(4):
        pages = check_step(step)
        rows = dataclasses.replace(step.rows, positions=step.rows.positions + 1)
        step = dataclasses.replace(step, rows=rows, pages=pages, key=step.key.flip(-1))


def one_head(leaving_score, heavy_score=1.0, **options):
    """A row at position 50 whose heavy scores are equal, ring as given."""
    step = make_step(params_of(**options), [50], heads=(1, 1))
    block = step.rows.block_table[0].long()
    step.pages.attention[block[:2]] = heavy_score
    step.pages.attention[block[2], 0, 2] = leaving_score
    return step, step.pages.births[block[:2], 0].flatten()


def heavy_births(step, pages):
    return pages.births[step.rows.block_table[0, :2].long(), 0].flatten()


@pytest.mark.parametrize("candidates", [8, 1024])
def test_of_equal_scores_the_oldest_loses(candidates, monkeypatch):
    """Within a tile of candidates and across tiles."""
    monkeypatch.setattr(launch, "CANDIDATE_TILE", candidates)
    step, before = one_head(leaving_score=2.0)
    after = heavy_births(step, check_step(step))
    (changed,) = (before != after).nonzero()
    assert before[changed] == before[4:].min()
    assert after[changed] == 34  # 50 - recent_slots


def test_an_equal_score_does_not_graduate():
    step, before = one_head(leaving_score=1.0)
    assert torch.equal(heavy_births(step, check_step(step)), before)


@pytest.mark.parametrize("ulps", [0, 1])
def test_means_that_differ_by_rounding(ulps):
    """Divisions must round as torch's: one unit in the last place decides."""
    leaving = torch.tensor(16 * 0.1)  # 16 queries saw it
    for _ in range(ulps):
        leaving = leaving.nextafter(torch.tensor(2.0))
    step, before = one_head(leaving, mean=True, sinks=0)
    step.rows.first_queries.zero_()
    blocks = step.rows.block_table[0, :2].long()
    step.pages.attention[blocks] = (50 - step.pages.births[blocks]) * 0.1
    # Every quotient rounds to 0.1 or above, but for 41 queries: 0.1 - 1 ulp.
    graduates = not torch.equal(heavy_births(step, check_step(step)), before)
    assert graduates == bool(ulps or (before == 50 - 41).any())


def test_rows_of_zeros_touch_block_zero_only():
    """Dummy and padding rows, whatever position they carry."""
    step = make_step(params_of(), [0, 30, 48, 63])
    step.rows.block_table.zero_()
    step.pages.attention[0], step.pages.births[0] = 0.0, 0
    step.pages.keys[0], step.pages.values[0] = 0.0, 0.0
    _, pages = step.run(decode_resident, scratch=step.scratch(3, 16))
    page = pages.page_stride
    assert torch.equal(content(pages)[page:], content(step.pages)[page:])


def test_padding_rows_touch_nothing():
    """Position -1, whatever block table row the padding carries."""
    step = make_step(params_of(), [30, 48, 63])
    step.rows.positions[1] = -1
    poisoned = dataclasses.replace(step, pages=clone(step.pages))
    output, pages = step.run(decode_resident, scratch=step.scratch(3, 16))
    others = step.rows.block_table[[0, 2]].flatten()
    expected, expected_pages = poisoned.run(reference.decode_resident, "cpu")
    assert (output[1] == 0).all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]])
    block = step.rows.block_table[1].long()
    for name in ("keys", "values", "attention", "births"):
        before, after = getattr(step.pages, name), getattr(pages, name)
        torch.testing.assert_close(after[block], before[block], equal_nan=True)
        torch.testing.assert_close(
            after[others], getattr(expected_pages, name)[others], equal_nan=True
        )


def test_before_its_first_query_a_row_leaves_all_scores_alone():
    """Rows that stay dense share pages."""
    step = make_step(params_of(), [20, 37, 45], heads=(4, 2))
    step.rows.first_queries[:2] = 48
    pages = check_step(step)
    for row, scores in enumerate([False, False, True]):
        blocks = step.rows.block_table[row].long()
        before, after = step.pages.attention[blocks], pages.attention[blocks]
        same = (before == after) | (before.isnan() & after.isnan())
        assert same.all() != scores


def test_strided_arguments():
    """Slices of wider tensors, 32-bit positions, and vLLM's CPU layout."""
    step = make_step(params_of(), [20, 53], heads=(4, 2))

    def widened(tensor, dim):
        wide = torch.cat([torch.full_like(tensor, 7), tensor], dim)
        return wide.narrow(dim, tensor.shape[dim], tensor.shape[dim])

    rows = ResidentRows(
        widened(step.rows.block_table, 1),
        step.rows.positions.int(),
        step.rows.first_queries.int(),
    )
    cache = step.pages.keys.new_full((step.pages.keys.shape[0], 2 * 16 * 130), 0.0)
    column_major = Pages.view(
        cache.as_strided((len(cache), 2, 16, 128), (2 * 16 * 130, 16 * 128, 128, 1))
    )
    for name in ("keys", "values", "attention", "births"):
        getattr(column_major, name).copy_(getattr(step.pages, name))
    check_step(
        dataclasses.replace(
            step,
            query=widened(step.query, 1),
            key=widened(step.key, 1),
            value=widened(step.value, 1),
            rows=rows,
            pages=column_major,
        )  # fmt: skip
    )


def test_rows_that_stay_dense():
    """By pages of their own, in which nothing competes and that have no state. Output
    of a row of position -1 is another call's."""
    step = make_step(params_of(sinks=32), [20, 9, 60])
    step.rows.positions[1] = -1
    step.rows.first_queries.fill_(99)
    rows = dataclasses.replace(step.rows, stay_dense=True)
    step = dataclasses.replace(step, rows=rows)
    expected, kept = step.run(reference.decode_resident, "cpu")
    scratch = step.scratch(2, 16)

    def by_content(query, key, value, pages, *rest):
        mine = dataclasses.replace(pages, state={}, births=pages.births[:0])
        decode_resident(query, key, value, mine, *rest)

    actual, pages = step.run(by_content, scratch=scratch)
    tolerance = TOLERANCE[torch.float32] | {"equal_nan": True}
    torch.testing.assert_close(actual, expected, **tolerance)
    assert actual[1].isnan().all() and not actual[[0, 2]].isnan().any()
    assert content(pages).equal(content(kept)), "the new tokens alone are written"
    assert scratch.logits.isnan().all()


def test_scratch_is_made_when_none_is_given():
    step = make_step(params_of(), [60])
    expected, _ = step.run(reference.decode_resident, "cpu")
    actual, _ = step.run(decode_resident)
    torch.testing.assert_close(actual, expected, **TOLERANCE[torch.float32])


def test_too_small_scratch_is_refused():
    step = make_step(params_of(), [5, 60])
    scratch = make_step(params_of(), [5]).scratch(3, 16)
    with pytest.raises(AssertionError, match="scratch"):
        step.run(decode_resident, scratch=scratch)


def test_no_batch_is_no_launch():
    step = make_step(params_of(), [5])
    rows = ResidentRows(
        step.rows.block_table[:0], step.rows.positions[:0], step.rows.first_queries[:0]
    )
    empty = dataclasses.replace(
        step, query=step.query[:0], key=step.key[:0], value=step.value[:0], rows=rows
    )
    output, pages = empty.run(decode_resident)
    assert len(output) == 0 and torch.equal(content(pages), content(step.pages))


def test_launcher_reads_no_value(monkeypatch):
    """On meta tensors, which have none: a step never waits for the device."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda **arguments: grids.append(grid)

    monkeypatch.setattr(launch, "attend_kernel", Recorder())
    monkeypatch.setattr(launch, "combine_kernel", Recorder())
    step = make_step(params_of(), [5, 60], heads=(6, 2))
    names = ("keys", "values", "births")
    pages = {name: getattr(step.pages, name).to("meta") for name in names}
    pages["state"] = {"attention": step.pages.attention.to("meta")}
    decode_resident(
        step.query.to("meta"), step.key.to("meta"), step.value.to("meta"),
        dataclasses.replace(step.pages, **pages),
        rows_to(step.rows, "meta"),
        step.params, torch.empty_like(step.query, device="meta"),
    )  # fmt: skip
    assert [grid[:2] for grid in grids] == [(2, 2), (2, 2)]


def test_unsupported_shapes_are_named():
    supported = {
        "dtype": torch.float32, "head_size": 64, "block_size": 16,
        "num_heads": 8, "num_kv_heads": 2,
    }  # fmt: skip
    check_supported(**supported)
    for bad, named in (
        ({"dtype": torch.float64}, "--dtype"),
        ({"block_size": 8}, "--block-size"),
        ({"head_size": 528}, "head size"),
        ({"num_heads": 2 * 32 + 1}, "at most 32 query heads"),
        ({"num_heads": 2 * 16 + 1, "head_size": 272}, "at most 16 query heads"),
    ):
        with pytest.raises(ValueError, match=named):
            check_supported(**(supported | bad))


@pytest.mark.parametrize(
    ("imported", "missing"),
    [
        ("vllm_h2o.attention.ops.triton", "vllm"),
        ("vllm_h2o.attention.ops.cpu", "triton"),
    ],
)
def test_imports_without(imported, missing):
    """The GPU benchmark has no vLLM, a CPU install no triton."""
    code = f"import sys; sys.modules[{missing!r}] = None; import {imported}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rich_head_has_more_splits_and_no_longer_ones(monkeypatch):
    monkeypatch.setattr(splitting, "num_sms", lambda device: 132)
    device, rows_by_heads = torch.device("cpu"), 32 * 8
    splits = [
        splitting.num_splits(
            splitting.Tuning(), rows_by_heads, 64, 2048, largest, device
        )
        for largest in (2048, 4096, 9216, 2**20)
    ]
    # What merges them has all in its registers: there are 64 at most.
    assert splits == [2, 4, 9, 64]
