"""Steps of CUDA's backend on the meta device.

Meta tensors have no values: reading one, as a wait for the device does, fails.
"""

import contextlib

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.core.helpers import plan_of
from tests.models import SMOLLM2
from vllm_h2o.attention.cuda_backend import H2OTritonAttentionBuilder
from vllm_h2o.attention.step import StepRows
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.life import RowPlan

DEVICE = torch.device("meta")
DECODES = {"a": RowPlan(40, 1, 33, 0, 64), "b": RowPlan(200, 1, 64, 0, 64)}
PROMPT = {"c": RowPlan(32, 1, 33, 0, 64), "d": RowPlan(0, 5, 90, 26, 64)}


def make_builder(**policy):
    """A builder for SmolLM2 with a budget of 64, and the engine's config."""
    options = {"kv_policy": "h2o", "h2o_budget": 64, "max_model_len": 256}
    options |= {"block_size": 32, "h2o_resident_dtype": "model", **policy}
    args = EngineArgs(model=str(SMOLLM2), dtype="float32", **options)
    config = args.create_engine_config()
    plain = FullAttentionSpec(
        block_size=16, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    spec = H2OAttentionSpec.of(plain, h2o_config(config), 256)
    config.cache_config.num_gpu_blocks = 100
    builder = H2OTritonAttentionBuilder(spec, [], config, DEVICE)
    builder.bind(StepRows())
    return builder, config


def build(builder, rows, padding=0, capture=False, guard=contextlib.nullcontext):
    """Metadata of a step of these rows, padded as for a full graph.

    The runner's own work is done before `guard` is entered.
    """
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
        with guard():
            if capture:
                return builder.build_for_cudagraph_capture(common), common
            return builder.build(0, common), common
    finally:
        builder.step.end()
