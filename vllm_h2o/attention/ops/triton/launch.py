"""The decode step on CUDA: two kernels and their scratch.

`attend_kernel` reads the pages split by split, `combine_kernel` merges and
rewrites what the step changes. Everything the kernels need to know of a step
is in device tensors and the grid depends on shapes alone, so a step can be
captured in a CUDA graph and never waits for the device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_h2o.attention.ops import Capability, DecodeParams, ResidentRows
from vllm_h2o.attention.ops.triton.combine import combine_kernel
from vllm_h2o.attention.ops.triton.decode import attend_kernel
from vllm_h2o.attention.pages import Pages

FORMS = frozenset({"sum", "mean"})
"""Methods that the kernels have, by `fused_form`."""
CAPABILITIES = frozenset({Capability.INT8, Capability.CHUNKS})
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
_TILE_BYTES = 8 * 1024
"""Of K, and of V, per loop step."""
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64
_MAX_MERGED = 16384
"""Elements of the outputs of all splits, which one program has in its registers."""
_LEAST_SPLIT = 128
"""Slots: what is shorter is not worth a program of its own."""
SCORE_TILE = 512
"""Slots whose attention one program updates."""
CANDIDATE_TILE = 1024
"""Heavy slots that compete at once."""


@dataclass(frozen=True)
class Tuning:
    """How `attend_kernel` cuts its work; the result but for rounding is the same.

    Attributes:
        num_splits: Splits of the slots; None: as many as fill the device.
        tile_slots: Slots per loop step; None: by the bytes of a slot.
        num_warps: Of a program.
        num_stages: Loop steps in flight. The block ids are read ahead of the K
            and V that they address.
    """

    num_splits: int | None = None
    tile_slots: int | None = None
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class DecodeScratch:
    """What the kernels of a decode step hand to each other; reused by all layers.

    Attributes:
        logits: `[logit_slots * query heads of a KV head]` float32, see `allocate`;
            a row's begin where `ResidentRows.logit_starts` says.
        outputs: `[max_partials * head_size]` float32, one partial per row,
            split and query head.
        maxima: `[max_partials]` float32.
        sums: `[max_partials]` float32.
        losers: `[max_rows * num_kv_heads]` int32.
        leaving_attention: `[max_rows * num_kv_heads]` float32.
        tuning: What it was allocated for.
    """

    logits: torch.Tensor
    outputs: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    losers: torch.Tensor
    leaving_attention: torch.Tensor
    tuning: Tuning

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        budget: int,
        largest_budget: int,
        device: torch.device,
        tuning: Tuning | None = None,
        logit_slots: int | None = None,
    ) -> DecodeScratch:
        """Scratch for batches of up to `max_rows` rows.

        KV heads have `budget` slots on average, none more than `largest_budget`; the
        rows that score have `logit_slots` together, over their KV heads (None: the
        most that `max_rows` could have).
        """
        if logit_slots is None:
            logit_slots = max_rows * num_kv_heads * largest_budget
        tuning = tuning or Tuning()
        partials = _partials(
            max_rows, num_heads, num_kv_heads, head_size, budget, largest_budget,
            device, tuning,
        )  # fmt: skip
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        return cls(
            logits=floats(logit_slots * (num_heads // num_kv_heads)),
            outputs=floats(partials * head_size),
            maxima=floats(partials),
            sums=floats(partials),
            losers=torch.empty(
                max_rows * num_kv_heads, dtype=torch.int32, device=device
            ),
            leaving_attention=floats(max_rows * num_kv_heads),
            tuning=tuning,
        )

    @staticmethod
    def bytes_of(
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        budget: int,
        largest_budget: int,
        logit_slots: int,
        device_type: str,
    ) -> int:
        """Bytes that `allocate` takes with the default tuning."""
        device = torch.device(device_type)
        partials = _partials(
            max_rows, num_heads, num_kv_heads, head_size, budget, largest_budget,
            device, Tuning(),
        )  # fmt: skip
        words = logit_slots * (num_heads // num_kv_heads) + 2 * max_rows * num_kv_heads
        return 4 * (words + partials * (head_size + 2))


def slots_with_logits(
    max_rows: int, most_slots: int, pool: int, slots_per_token: float
) -> int:
    """Slots of KV heads that all rows that score have together, at most.

    A row that scores owns the blocks of its `min(tokens, budget)` slots on average, so
    that the pool bounds what all of them have, however many there could be.

    Args:
        max_rows: Rows of a batch.
        most_slots: That the KV heads of a row have together.
        pool: Tokens of all blocks.
        slots_per_token: That the KV heads of a row have together for a token of its
            budget.
    """
    return min(max_rows * most_slots, math.ceil(pool * slots_per_token))


def _partials(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    budget: int,
    largest_budget: int,
    device: torch.device,
    tuning: Tuning,
) -> int:
    """Most partial outputs of a batch of up to `max_rows` rows."""
    return num_heads * max(
        rows
        * _num_splits(
            tuning, rows * num_kv_heads, head_size, budget, largest_budget, device
        )
        for rows in range(1, max_rows + 1)
    )


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: DecodeParams,
    output: torch.Tensor,
    *,
    scored: bool = True,
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
        scored: False leaves attention alone and lets nothing graduate: for a
            layout without competition, whose attention nobody reads.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads, layout = key.shape[1], params.layout
    assert params.placements is None or not layout.whole_blocks
    check_supported(query.dtype, head_size, layout.block_size, num_heads, num_kv_heads)
    _check_strides(query, key, value, pages, rows, output)
    if num_rows == 0:
        return
    assert params.fused_form in FORMS, params.method
    scratch = rows.scratch
    if scratch is None:
        scratch = DecodeScratch.allocate(
            num_rows, num_heads, num_kv_heads, head_size, params.layout.budget,
            params.largest_budget, query.device,
        )  # fmt: skip
    starts = rows.logit_starts
    if starts is None:
        apart = num_kv_heads * params.largest_budget
        starts = torch.arange(num_rows, device=query.device) * apart
        assert num_rows * apart * num_heads <= scratch.logits.numel() * num_kv_heads
    shapes = _shapes(query, num_kv_heads, params, scratch, scored)
    shared = {
        "key": key, "key_strides": key.stride()[:2],
        "value": value, "value_strides": value.stride()[:2],
        **page_arguments(pages),
        "table": rows.block_table, "table_stride": rows.block_table.stride(0),
        **(NO_TABLES if rows.placements is None else table_arguments(params)),
        "positions": rows.positions,
        "first_queries": rows.first_queries, "placements": rows.placements,
        "grown_at": None if rows.placements is None else rows.grown_at,
        "logits": scratch.logits, "logit_starts": starts,
        "partial_outputs": scratch.outputs,
        "partial_maxima": scratch.maxima, "partial_sums": scratch.sums,
        "losers": scratch.losers, "leaving_attention": scratch.leaving_attention,
        **shapes,
    }  # fmt: skip
    attend_kernel[(num_rows, num_kv_heads, shapes["max_splits"])](
        query=query, query_strides=query.stride()[:2],
        scale=params.scale, softcap=params.softcap,
        PINNED=layout.pinned_slots, SOFTCAP=params.softcap > 0.0,
        MEAN=params.fused_form == "mean",
        BLOCK_S=_tile_slots(scratch.tuning, query),
        CANDIDATES=max(1, CANDIDATE_TILE // shapes["BLOCK_U"]),
        num_warps=scratch.tuning.num_warps, num_stages=scratch.tuning.num_stages,
        **shared,
    )  # fmt: skip
    group = shapes["GROUP"]
    tile = min(SCORE_TILE, triton.next_power_of_2(params.largest_budget))
    tiles = triton.cdiv(params.largest_budget, tile) if scored else 1
    programs = max(group, tiles)
    combine_kernel[(num_rows, num_kv_heads, programs)](
        output=output, output_strides=output.stride()[:2],
        sink_logits=params.sink_logits, score_decay=params.score_decay, BLOCK_T=tile,
        BLOCK_P=triton.next_power_of_2(shapes["max_splits"]),
        num_warps=4, **shared,
    )  # fmt: skip


NO_TABLES: dict[str, Any] = {"sizes": None, "lists": None}
"""`table_arguments` where all heads have the same budget."""


def table_arguments(params: DecodeParams) -> dict[str, Any]:
    """Kernel arguments that say how placements have their slots."""
    tables = params.device_tables
    if tables is None:
        return NO_TABLES
    return {"sizes": tables.sizes, "lists": tables.pages and tuple(tables.pages)}


def page_arguments(pages: Pages) -> dict[str, Any]:
    """Kernel arguments that address the pages, rows of K and V."""
    assert pages.attention.stride() == pages.births.stride()
    return {
        **vector_arguments(pages),
        "attention": pages.attention, "births": pages.births,
        "state_strides": pages.attention.stride(),
    }  # fmt: skip


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
    most = _rows_of(head_size, _MAX_OUTPUT, _MAX_GROUP)
    if num_heads > most * num_kv_heads:
        raise ValueError(
            f"H2O on CUDA shares a KV head of size {head_size} among at most {most} "
            f"query heads, this model has {num_heads} over {num_kv_heads}: drop "
            "--kv-policy"
        )


def copied_tokens(head_size: int) -> int:
    """Tokens whose K and V a program has at once, so that registers hold them."""
    return _rows_of(head_size, _COPIED, 32)


def _rows_of(head_size: int, elements: int, most: int) -> int:
    """Heads' rows that as many elements have room for, `most` at most."""
    return min(most, elements // triton.next_power_of_2(head_size))


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
    num_kv_heads: int,
    params: DecodeParams,
    scratch: DecodeScratch,
    scored: bool,
) -> dict[str, Any]:
    """The sizes that both kernels share; in capitals what they are compiled for."""
    num_rows, num_heads, head_size = query.shape
    layout, largest = params.layout, params.largest_budget
    tile = _tile_slots(scratch.tuning, query)
    splits = _num_splits(
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
        "COMPETES": scored and layout.pinned_slots < layout.heavy_slots,
        "max_splits": splits, "split_slots": split_slots, "tile": tile,
        "least_split": min(split_slots, _LEAST_SPLIT),
        # Tensor cores multiply 16 rows at least.
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": triton.next_power_of_2(head_size),
        "BLOCK_U": triton.next_power_of_2(unit),
    }  # fmt: skip


def _check_capacity(scratch: DecodeScratch, partials: int, head_size: int) -> None:
    assert partials <= scratch.maxima.numel(), "scratch of fewer rows or splits"
    assert partials * head_size <= scratch.outputs.numel(), "scratch of a smaller head"


def _tile_slots(tuning: Tuning, query: torch.Tensor) -> int:
    if tuning.tile_slots is not None:
        return tuning.tile_slots
    row_bytes = triton.next_power_of_2(query.shape[2]) * query.element_size()
    return min(max(_TILE_BYTES // row_bytes, 16), 128)


def _num_splits(
    tuning: Tuning,
    items: int,
    head_size: int,
    budget: int,
    largest_budget: int,
    device: torch.device,
) -> int:
    """Splits of the richest head, for a batch of `items` rows times KV heads.

    They are as long as those that cut a head of average budget into as many as fill
    the device: a rich head has more of them, not longer ones that all others wait for.
    """
    if tuning.num_splits is not None:
        return tuning.num_splits
    # One more would leave a second wave that hardly fills the device.
    wanted = _PROGRAMS_PER_SM * num_sms(device) // items
    of_average = max(1, min(wanted, budget // _LEAST_SPLIT))
    most = _rows_of(head_size, _MAX_MERGED, _MAX_SPLITS)
    return min(triton.cdiv(of_average * largest_budget, budget), most)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; off CUDA (the interpreter) one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
