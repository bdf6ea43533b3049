"""The metadata builder of CUDA: what it writes in place, and that it never waits."""

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.smollm2 import ensure_model
from tests.core.helpers import plan_of
from vllm_h2o.attention.cuda_backend import H2OTritonAttentionBuilder
from vllm_h2o.attention.metadata import H2OMetadata, StepRows
from vllm_h2o.core.plan import RowPlan
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec

# Meta tensors have no values: reading one, as a wait for the device does, fails.
DEVICE = torch.device("meta")
DECODES = {"a": RowPlan(40, 1, 33), "b": RowPlan(200, 1, 64)}
PROMPT = {"c": RowPlan(32, 1, 33), "d": RowPlan(0, 5, 90)}


@pytest.fixture(scope="module")
def builder():
    options = {"kv_policy": "h2o", "h2o_budget": 64, "max_model_len": 256}
    options["block_size"] = 32
    args = EngineArgs(model=str(ensure_model()), dtype="float32", **options)
    config = args.create_engine_config()
    plain = FullAttentionSpec(
        block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    spec = H2OAttentionSpec.of(plain, h2o_config(config), 256)
    builder = H2OTritonAttentionBuilder(spec, [], config, DEVICE)
    builder.bind(StepRows())
    return builder


def build(builder, rows, padding=0, capture=False):
    """Metadata of a step of these rows, padded as for a full graph."""
    lengths = [row.num_scheduled_tokens for row in rows.values()] + [1] * padding
    num_reqs, num_tokens = len(lengths), sum(lengths)
    start_loc = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=start_loc.to(DEVICE), query_start_loc_cpu=start_loc,
        seq_lens=torch.empty(num_reqs, dtype=torch.int32, device=DEVICE),
        num_reqs=num_reqs, num_actual_tokens=num_tokens, max_query_len=max(lengths),
        max_seq_len=256, slot_mapping=torch.empty(num_tokens, device=DEVICE).long(),
        block_table_tensor=torch.empty(num_reqs, 20, device=DEVICE).int(),
    )  # fmt: skip
    builder.step.request_ids = lambda: list(rows)
    if rows and not capture:
        builder.step.begin(plan_of(rows), [])
    try:
        if capture:
            return builder.build_for_cudagraph_capture(common), common
        return builder.build(0, common), common
    finally:
        builder.step.end()


def test_decodes_are_written_into_what_a_graph_holds(builder):
    captured, _ = build(builder, DECODES, padding=1, capture=True)
    replayed, common = build(builder, DECODES, padding=1)
    for metadata in (captured, replayed):
        assert metadata.stock is None and metadata.resident_tokens is None
        resident = metadata.resident
        assert resident.positions._base is builder._positions
        assert resident.first_queries._base is builder._first_queries
        assert len(resident.positions) == len(resident.block_table) == 3
        assert resident.scratch is builder._scratch
    # The runner's own table, which it writes in place.
    assert replayed.resident.block_table._base is common.block_table_tensor
    assert replayed.resident.block_table.shape == (3, 64 // 16)


def test_mixed_batches_are_split(builder):
    metadata, _ = build(builder, {**PROMPT, **DECODES})
    assert len(metadata.resident_tokens) == 2 and len(metadata.stock_tokens) == 6
    assert metadata.stock.num_actual_tokens == 6 and metadata.stock.max_query_len == 5
    # Only the prompt that ends here is near enough its end to be observed.
    (observed,) = metadata.observed
    assert observed.tokens == slice(0, 1) and len(observed.dense_blocks) == 3
    assert len(observed.resident_blocks) == 3


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
