"""The decode step on CUDA: two kernels, or three where queries read a part.

`attend_kernel` reads the pages split by split, `combine_kernel` merges and
rewrites what the step changes. Everything the kernels need to know of a step
is in device tensors and the grid depends on shapes alone, so a step can be
captured in a CUDA graph and never waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from vllm_h2o.attention.device_tables import DeviceTables
from vllm_h2o.attention.ops import Capability, DraftLog, LayerParams, ResidentRows
from vllm_h2o.attention.ops.triton.combine import combine_kernel
from vllm_h2o.attention.ops.triton.decode import attend_kernel
from vllm_h2o.attention.ops.triton.drafts import note_drafts
from vllm_h2o.attention.ops.triton.sparse_read import BILLION, PAGE_TILE, rank_kernel
from vllm_h2o.attention.ops.triton.splitting import (
    LEAST_SPLIT,
    DecodeScratch,
    num_splits,
    rows_of,
    tile_slots,
)
from vllm_h2o.attention.pages import Pages

FORMS = frozenset({"sum", "mean"})
"""Methods that the kernels have, by `fused_form`."""
CAPABILITIES = frozenset(Capability) - {
    Capability.MERGE, Capability.PROMPT_CHUNKS, Capability.TORCH,
}  # fmt: skip
"""What the kernels have beside."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_SIZE = 512
_MAX_GROUP = 32
_MAX_OUTPUT = 8192
"""Elements of the outputs of a KV head's query heads: a program's registers hold them,
and more than these spill."""
_COPIED = 8192
"""Elements of K, and of V, that a program holds at once to copy them, or to read a
gate's word off them."""
_RANKED = 8192
"""Elements of the bounds of pages that a program holds at once to rank them."""
SCORE_TILE = 512
"""Slots whose attention one program updates."""
CANDIDATE_TILE = 1024
"""Heavy slots that compete at once."""


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: LayerParams,
    output: torch.Tensor,
    log: DraftLog | None = None,
) -> None:
    """See `Kernels.decode_resident`.

    Args:
        query: As there.
        key: As there.
        value: As there.
        pages: As there, any strides.
        rows: As there; positions and first queries of any integer type. A row
            of zeros in the block table reads and writes block 0 only; one of
            position -1 touches no page, and its output is 0.
        params: As there.
        output: As there.
        log: As there, made by `draft_log`. Its attention is packed as the logits are.
    """
    num_rows, (num_heads, head_size) = len(rows.positions), query.shape[1:]
    assert rows.counts is not None or len(query) == num_rows
    num_kv_heads, layout = key.shape[1], params.layout
    assert params.placements is None or not layout.whole_blocks
    check_supported(query.dtype, head_size, layout.block_size, num_heads, num_kv_heads)
    _check_strides(query, key, value, pages, rows, output)
    if num_rows == 0:
        return
    assert params.fused_form in FORMS, params.method
    scratch = rows.scratch
    assert log is None or not (layout.whole_blocks or rows.stay_dense)
    if scratch is None:
        scratch = DecodeScratch.allocate(
            num_rows, num_heads, num_kv_heads, head_size, params.layout.budget,
            params.largest_budget, query.device,
            page_slots=layout.block_size if params.read < 1.0 else 0,
        )  # fmt: skip
    scored = not rows.stay_dense
    starts = logit_starts_of(rows, num_kv_heads, params) if scored else None
    tables = None if rows.placements is None else params.device_tables
    shapes = _shapes(query, num_rows, num_kv_heads, params, scratch, scored)
    splits, tile = shapes["max_splits"], shapes["tile"]
    score_tile = min(SCORE_TILE, triton.next_power_of_2(params.largest_budget))
    attend_grid: tuple[int, ...]
    combine_grid: tuple[int, ...]
    if tables is None:
        score_tiles = triton.cdiv(layout.budget, score_tile) if scored else 1
        attend_grid = num_rows, num_kv_heads, splits
        combine_grid = num_rows, num_kv_heads, max(shapes["GROUP"], score_tiles)
    else:
        attend_grid = num_rows, tables.most_splits(splits, shapes["least_split"], tile)
        combine_grid = num_rows, tables.most_parts(score_tile, shapes["GROUP"])
    shared = {
        "key": key, "key_strides": key.stride()[:2],
        "value": value, "value_strides": value.stride()[:2],
        **page_arguments(pages),
        "table": rows.block_table, "table_stride": rows.block_table.stride(0),
        **table_arguments(tables),
        "positions": rows.positions, "counts": rows.counts, "starts": rows.starts,
        "first_queries": rows.first_queries, "placements": rows.placements,
        "grown_at": None if rows.placements is None else rows.grown_at,
        "logits": scratch.logits, "logit_starts": starts,
        "partial_outputs": scratch.outputs,
        "partial_maxima": scratch.maxima, "partial_sums": scratch.sums,
        "losers": scratch.losers, "leaving_attention": scratch.leaving_attention,
        **read_arguments(scratch, shapes["READ"] > 0), **shapes,
    }  # fmt: skip
    candidates = max(1, CANDIDATE_TILE // shapes["BLOCK_U"])
    if shapes["READ"]:
        assert rows.counts is None and log is None, "drafts are read whole"
        assert pages.bounds is not None and scratch.reads is not None
        rank_kernel[(num_rows, num_kv_heads)](
            query=query, query_strides=query.stride()[:2], draft=0,
            bounds=pages.bounds, read_images=scratch.reads[2],
            PINNED=layout.pinned_slots, MEAN=params.fused_form == "mean",
            ROWS=bound_rows(head_size, layout.block_size), CANDIDATES=candidates,
            PAGES=rows_of(head_size, _RANKED, 64), TILE=PAGE_TILE, num_warps=4,
            **shared,
        )  # fmt: skip
    for draft in range(rows.most_tokens):
        attend_kernel[attend_grid](
            query=query, query_strides=query.stride()[:2], draft=draft,
            scale=params.scale, softcap=params.softcap,
            PINNED=layout.pinned_slots, SOFTCAP=params.softcap > 0.0,
            MEAN=params.fused_form == "mean",
            BLOCK_S=tile,
            CANDIDATES=candidates,
            num_warps=scratch.tuning.num_warps, num_stages=scratch.tuning.num_stages,
            **shared,
        )  # fmt: skip
        if log is not None and draft:
            note_drafts(log, draft, num_rows, params.largest_budget, shared)
        combine_kernel[combine_grid](
            output=output, output_strides=output.stride()[:2], draft=draft,
            sink_logits=params.sink_logits, score_decay=params.score_decay,
            BLOCK_T=score_tile,
            BLOCK_P=triton.next_power_of_2(splits),
            PADS=not rows.stay_dense,
            num_warps=4, **shared,
        )  # fmt: skip


def logit_starts_of(
    rows: ResidentRows, num_kv_heads: int, params: LayerParams
) -> torch.Tensor:
    """`ResidentRows.logit_starts`; if there are none, as far apart as need be."""
    if rows.logit_starts is not None:
        return rows.logit_starts
    apart = num_kv_heads * params.largest_budget
    return torch.arange(len(rows.positions), device=rows.positions.device) * apart


def draft_log(
    pages: Pages, num_rows: int, most_drafts: int, logit_slots: int
) -> DraftLog:
    """An empty log of a layer, see `DraftLog`.

    Args:
        pages: The layer's.
        num_rows: Of a batch, at most.
        most_drafts: Of a row.
        logit_slots: Of all rows that score, over KV heads.
    """
    attention = torch.empty(most_drafts, logit_slots, device=pages.keys.device)
    return DraftLog.of(pages, num_rows, most_drafts, attention)


def table_arguments(tables: DeviceTables | None) -> dict[str, Any]:
    """Kernel arguments that say how placements have their slots.

    `tables` are None where all heads have the same budget.
    """
    if tables is None:
        return {"sizes": None, "lists": None}
    return {"sizes": tables.sizes, "lists": tables.pages and tuple(tables.pages)}


def read_arguments(scratch: DecodeScratch, reads_part: bool) -> dict[str, Any]:
    """Kernel arguments that say which pages queries read, if it is a part of them."""
    pages, flags, _ = (None,) * 3 if scratch.reads is None else scratch.reads
    counts = scratch.read_counts
    assert not reads_part or (pages is not None and counts is not None)
    named = {"read_pages": pages, "read_flags": flags, "read_counts": counts}
    return named if reads_part else dict.fromkeys(named)


def page_arguments(pages: Pages) -> dict[str, Any]:
    """Kernel arguments that address the pages, rows of K and V."""
    state: dict[str, Any]
    if not pages.state:  # of dense pages
        state = {"attention": None, "births": None, "state_strides": (0, 0, 0)}
    else:
        assert pages.attention.stride() == pages.births.stride()
        state = {
            "attention": pages.attention, "births": pages.births,
            "state_strides": pages.attention.stride(),
        }  # fmt: skip
    return vector_arguments(pages) | state


def vector_arguments(pages: Pages) -> dict[str, Any]:
    """Those of keys and values, also where pages have no state."""
    keys = pages.keys.transpose(2, 3)
    return {
        "keys": keys, "keys_strides": keys.stride(),
        "values": pages.values, "values_strides": pages.values.stride(),
        "key_scales": pages.key_scales, "value_scales": pages.value_scales,
    }  # fmt: skip


def check_supported(
    dtype: torch.dtype,
    head_size: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raise ValueError for what the kernels do not have."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"H2O on CUDA has no kernel for dtype {dtype} (--dtype): "
            "use float32, bfloat16 or float16"
        )
    if head_size % 16 or head_size > _MAX_HEAD_SIZE or block_size % 16:
        raise ValueError(
            f"H2O on CUDA needs a head size ({head_size}) of at most {_MAX_HEAD_SIZE} "
            f"and a --block-size ({block_size}), both multiples of 16"
        )
    most = rows_of(head_size, _MAX_OUTPUT, _MAX_GROUP)
    if num_heads > most * num_kv_heads:
        raise ValueError(
            f"H2O on CUDA shares a KV head of size {head_size} among at most {most} "
            f"query heads, this model has {num_heads} over {num_kv_heads}: drop "
            "--kv-policy"
        )


def bound_rows(head_size: int, block_size: int) -> int:
    """Keys of a page that a program has at once to bound them."""
    return min(copied_tokens(head_size), triton.next_power_of_2(block_size))


def copied_tokens(head_size: int) -> int:
    """Tokens whose K and V a program has at once, so that registers hold them."""
    return rows_of(head_size, _COPIED, 32)


def _check_strides(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    output: torch.Tensor,
) -> None:
    for tensor in (query, key, value, output):
        assert tensor.dtype == query.dtype
        assert pages.quantized or tensor.dtype == pages.keys.dtype
        assert tensor.stride(2) == 1
    assert rows.block_table.dtype == torch.int32
    assert rows.block_table.stride(1) == 1
    assert rows.positions.is_contiguous() and rows.first_queries.is_contiguous()


def _shapes(
    query: torch.Tensor,
    num_rows: int,
    num_kv_heads: int,
    params: LayerParams,
    scratch: DecodeScratch,
    scored: bool,
) -> dict[str, Any]:
    """The sizes that the kernels share; in capitals what they are compiled for."""
    num_heads, head_size = query.shape[1:]
    layout, largest = params.layout, params.largest_budget
    tile = tile_slots(scratch.tuning, query)
    splits = num_splits(
        scratch.tuning, num_rows * num_kv_heads, head_size, layout.budget, largest,
        query.device,
    )  # fmt: skip
    split_slots = triton.cdiv(triton.cdiv(largest, splits), tile) * tile
    splits = triton.cdiv(largest, split_slots)
    group = num_heads // num_kv_heads
    _check_capacity(scratch, num_rows * num_heads * splits, head_size)
    unit = layout.block_size if layout.whole_blocks else 1
    return {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_SIZE": head_size,
        "BLOCK_SIZE": layout.block_size, "HEAVY": layout.heavy_slots,
        "BUDGET": layout.budget, "UNIT": unit,
        "SCORED": scored,
        "READ": round(params.read * BILLION) % BILLION if scored else 0,
        "COMPETES": scored and layout.pinned_slots < layout.heavy_slots,
        "max_splits": splits, "split_slots": split_slots, "tile": tile,
        "least_split": min(split_slots, LEAST_SPLIT),
        # Tensor cores multiply 16 rows at least.
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": triton.next_power_of_2(head_size),
        "BLOCK_U": triton.next_power_of_2(unit),
        "BLOCK_H": triton.next_power_of_2(num_kv_heads),
    }  # fmt: skip


def _check_capacity(scratch: DecodeScratch, partials: int, head_size: int) -> None:
    assert partials <= scratch.maxima.numel(), "scratch of fewer rows or splits"
    assert partials * head_size <= scratch.outputs.numel(), "scratch of a smaller head"
