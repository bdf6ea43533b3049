"""One decode step of resident rows: the contract, and the choice of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.layout import SlotLayout


@dataclass(frozen=True)
class ResidentRows:
    """The resident rows of a batch, one new token each.

    Attributes:
        block_table: `[num_rows, >= budget_blocks]` int32 resident blocks.
        positions: `[num_rows]` int64 position of the new token.
        first_queries: `[num_rows]` int64 position of the first prompt query
            that scored.
    """

    block_table: torch.Tensor
    positions: torch.Tensor
    first_queries: torch.Tensor


@dataclass(frozen=True)
class DecodeParams:
    """What one layer's decode step depends on besides its tensors.

    Attributes:
        layout: The slots of a request.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        score_decay: Factor on old scores per new query.
        mean: Compare scores divided by the queries that could see a token.
    """

    layout: SlotLayout
    scale: float
    softcap: float
    score_decay: float
    mean: bool


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """Graduate, write, attend and score, for every row and KV head.

    Args:
        query: `[num_rows, num_heads, head_size]`, float32, bfloat16 or float16.
        key: `[num_rows, num_kv_heads, head_size]` of the new tokens, after RoPE.
        value: `[num_rows, num_kv_heads, head_size]`.
        pages: The layer's pages, updated in place.
        rows: Which pages and positions.
        params: The layer's constants.
        output: `[num_rows, num_heads, head_size]`, written.

    Raises:
        ValueError: A dtype or head size that no kernel has.
    """
    if query.is_cuda:
        from vllm_h2o.attention.ops import triton as kernel
    else:
        from vllm_h2o.attention.ops import cpu as kernel  # type: ignore[no-redef]

    kernel.decode_resident(query, key, value, pages, rows, params, output)
