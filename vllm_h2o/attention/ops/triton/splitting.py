"""How a decode step's slots are split, and what its kernels hand to each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton

_TILE_BYTES = 8 * 1024
"""Of K, and of V, per loop step."""
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64
_MAX_MERGED = 16384
"""Elements of the outputs of all splits, which one program has in its registers."""
LEAST_SPLIT = 128
"""Slots: what is shorter is not worth a program of its own."""


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
        reads: `[3, pages]` int32 where queries read a part of the pages: which are
            read, whether a page is, and what pages compete by; of rows that score, see
            `first_page_of` of the Triton kernels.
        read_counts: `[max_rows * num_kv_heads]` int32 how many are read.
    """

    logits: torch.Tensor
    outputs: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    losers: torch.Tensor
    leaving_attention: torch.Tensor
    tuning: Tuning
    reads: torch.Tensor | None = None
    read_counts: torch.Tensor | None = None

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
        dense_budget: int = 0,
        page_slots: int = 0,
    ) -> DecodeScratch:
        """Scratch for batches of up to `max_rows` rows.

        KV heads have `budget` slots on average, none more than `largest_budget`; the
        rows that score have `logit_slots` together, over their KV heads (None: the
        most that `max_rows` could have). Rows that stay dense have `dense_budget` in a
        call of their own (0: there is none). Queries that read a part of the pages have
        pages of `page_slots` (0: they read all).
        """
        if logit_slots is None:
            logit_slots = max_rows * num_kv_heads * largest_budget
        tuning = tuning or Tuning()
        partials = _partials(
            max_rows, num_heads, num_kv_heads, head_size,
            ((budget, largest_budget), (dense_budget, dense_budget)), device, tuning,
        )  # fmt: skip
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        ints = functools.partial(torch.empty, dtype=torch.int32, device=device)
        items = max_rows * num_kv_heads
        pages = page_slots and pages_of(logit_slots, page_slots, items)
        return cls(
            logits=floats(logit_slots * (num_heads // num_kv_heads)),
            outputs=floats(partials * head_size),
            maxima=floats(partials),
            sums=floats(partials),
            losers=ints(items),
            leaving_attention=floats(items),
            tuning=tuning,
            reads=ints(3, pages) if pages else None,
            read_counts=ints(items) if pages else None,
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
        dense_budget: int = 0,
        page_slots: int = 0,
    ) -> int:
        """Bytes that `allocate` takes with the default tuning."""
        device = torch.device(device_type)
        partials = _partials(
            max_rows, num_heads, num_kv_heads, head_size,
            ((budget, largest_budget), (dense_budget, dense_budget)), device, Tuning(),
        )  # fmt: skip
        items = max_rows * num_kv_heads
        words = logit_slots * (num_heads // num_kv_heads) + 2 * items
        if page_slots:
            words += 3 * pages_of(logit_slots, page_slots, items) + items
        return 4 * (words + partials * (head_size + 2))


def pages_of(logit_slots: int, page_slots: int, items: int) -> int:
    """Room for a number of each page of all rows that score.

    Args:
        logit_slots: Of these rows' KV heads.
        page_slots: Of a page.
        items: Rows times KV heads, at most.
    """
    # Rows of several of these numbers begin at addresses that 16 divides.
    return math.ceil((logit_slots // page_slots + items) / 4) * 4


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
    budgets: Iterable[tuple[int, int]],
    device: torch.device,
    tuning: Tuning,
) -> int:
    """Most partial outputs of a batch of up to `max_rows` rows, in a call by any of
    these `(budget, largest_budget)`; 0: there is no such call."""
    return num_heads * max(
        rows * num_splits(tuning, rows * num_kv_heads, head_size, *both, device)
        for both in budgets
        if both[0]
        for rows in range(1, max_rows + 1)
    )


def tile_slots(tuning: Tuning, query: torch.Tensor) -> int:
    """Slots that `attend_kernel` reads per loop step."""
    if tuning.tile_slots is not None:
        return tuning.tile_slots
    row_bytes = triton.next_power_of_2(query.shape[2]) * query.element_size()
    return min(max(_TILE_BYTES // row_bytes, 16), 128)


def num_splits(
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
    of_average = max(1, min(wanted, budget // LEAST_SPLIT))
    most = rows_of(head_size, _MAX_MERGED, _MAX_SPLITS)
    return min(triton.cdiv(of_average * largest_budget, budget), most)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; off CUDA (the interpreter) one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(head_size: int, elements: int, most: int) -> int:
    """Heads' rows that as many elements have room for, `most` at most."""
    return min(most, elements // triton.next_power_of_2(head_size))
