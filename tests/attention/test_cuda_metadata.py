"""The metadata builder of CUDA: what it writes in place, and that it never waits."""

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.attention.cuda_meta import (
    DECODES,
    DEVICE,
    PROMPT,
    build,
    make_builder,
    plan_of,
)
from vllm_h2o.attention.metadata import H2OMetadata
from vllm_h2o.policy.life import RowPlan


@pytest.fixture(scope="module")
def builder():
    return make_builder()[0]


def test_decodes_are_written_into_what_a_graph_holds(builder):
    captured, _ = build(builder, DECODES, padding=1, capture=True)
    replayed, _ = build(builder, DECODES, padding=1)
    for metadata in (captured, replayed):
        assert metadata.stock is None and metadata.resident_tokens is None
        resident = metadata.resident
        assert resident.positions._base is builder._tensors._positions
        assert resident.first_queries._base is builder._tensors._first_queries
        assert len(resident.positions) == len(resident.block_table) == 3
        assert resident.scratch is builder._tensors._scratch
        assert resident.logit_starts._base is builder._tensors._logit_starts
        assert resident.block_table._base is builder._tensors._block_table
        assert resident.block_table.shape == (3, 64 // 16)


def test_logits_lie_without_gaps(builder):
    """Of the slots that rows have; none of a row that has not come to a query that
    scores, whose blocks may be others' too."""
    whole = {"whole": RowPlan(50, 1, 51, 60, 64)}
    rows = plan_of({**DECODES, **whole, "last": RowPlan(63, 1, 33, 0, 64)})
    held, uniform = [3 * 41, 3 * 64, 0, 3 * 64], np.zeros(4, np.int32)
    assert builder._pack(rows, uniform).tolist() == [0, *np.cumsum(held)[:-1]]
    # All blocks that there are, and one row more.
    blocks = 100 // (64 // 16)
    full = {str(i): RowPlan(9999, 1, 64, 0, 64) for i in range(blocks + 1)}
    with pytest.raises(AssertionError, match="more than the pool"):
        builder._pack(plan_of(full), np.zeros(len(full), np.int32))


def test_mixed_batches_are_split(builder):
    metadata, _ = build(builder, {**PROMPT, **DECODES})
    assert len(metadata.resident_tokens) == 2 and len(metadata.stock_tokens) == 6
    assert metadata.stock.num_actual_tokens == 6 and metadata.stock.max_query_len == 5
    # Only the prompt that ends here is near enough its end to be observed.
    (observed,) = metadata.prompts
    assert observed.tokens == slice(0, 1) and len(observed.blocks) == 3
    assert len(observed.resident) == 3


def test_what_stays_dense_stays_in_the_graph():
    builder, _ = make_builder()
    rows = {**DECODES, "whole": RowPlan(40, 1, 30, 64, 64)}
    metadata, _ = build(builder, rows)
    assert metadata.stock is None and len(metadata.resident.positions) == 3


def test_what_stays_dense_stays_in_the_graph_beside_int8():
    """By a call of its own, over as many rows; also where no row stays dense."""
    builder, _ = make_builder(h2o_resident_dtype="int8")
    whole = {"whole": RowPlan(40, 1, 30, 64, 64)}
    captured, _ = build(builder, DECODES, padding=2, capture=True)
    batches = {**DECODES, **whole}, {**DECODES, "c": DECODES["a"]}, whole
    for metadata in captured, *(build(builder, x, 4 - len(x))[0] for x in batches):
        assert metadata.stock is None and not metadata.prompts
        assert metadata.resident_tokens is metadata.dense_tokens is None
        for rows, tensors in (
            (metadata.resident, builder._tensors),
            (metadata.dense, builder._dense_tensors),
        ):
            assert len(rows.positions) == len(rows.block_table) == 4
            assert rows.positions._base is tensors._positions
            assert rows.block_table._base is tensors._block_table
            assert rows.scratch is builder._tensors._scratch
            assert rows.stay_dense == (rows is metadata.dense)
    metadata, _ = build(builder, {**PROMPT, **DECODES, **whole})
    assert len(metadata.resident_tokens) == 2 and len(metadata.dense_tokens) == 1


def test_prompts_alone_run_stock(builder):
    metadata, _ = build(builder, PROMPT)
    assert metadata.resident is None and metadata.stock_tokens is None


def test_steps_without_a_plan(builder):
    """A warm-up of one token per request runs the resident kernels over padding."""
    metadata, _ = build(builder, {}, padding=2)
    assert isinstance(metadata, H2OMetadata) and len(metadata.resident.positions) == 2
    step, builder.step = builder.step, None
    try:
        metadata, _ = build_unbound(builder)
    finally:
        builder.step = step
    assert not isinstance(metadata, H2OMetadata)


def build_unbound(builder):
    start_loc = torch.tensor([0, 4], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=start_loc.to(DEVICE), query_start_loc_cpu=start_loc,
        seq_lens=torch.empty(1, dtype=torch.int32, device=DEVICE), num_reqs=1,
        num_actual_tokens=4, max_query_len=4, max_seq_len=256,
        slot_mapping=torch.empty(4, device=DEVICE).long(),
        block_table_tensor=torch.empty(1, 20, device=DEVICE).int(),
    )  # fmt: skip
    return builder.build(0, common), common


def test_groups_of_one_engine_share_their_scratch():
    """The worker takes it off the KV cache once, however many groups there are."""
    builder, config = make_builder()
    sibling = type(builder)(builder.kv_cache_spec, [], config, DEVICE)
    assert sibling._tensors._scratch is builder._tensors._scratch
    other, _ = make_builder()
    assert other._tensors._scratch is not builder._tensors._scratch
