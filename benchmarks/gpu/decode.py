"""Resident decode: microseconds per layer, bandwidth, against the full context."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.measure import microseconds
from benchmarks.gpu.prompt import params_of, uneven_heads
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.state import random_pages, random_tokens
from vllm_h2o.attention.ops import ResidentRows
from vllm_h2o.attention.ops.triton import DecodeScratch, Tuning, decode_resident
from vllm_h2o.attention.placements import BY_HEAD

Row = dict[str, Any]

SCORED, PLAIN = "resident, scores and graduation", "resident, neither"
CONTEXT = "full context, torch SDPA"


def measure_all(sizes: Sizes, device: torch.device, copy_gb_per_s: float) -> list[Row]:
    """Issue 5's comparisons 1 and 2."""
    scored = resident(sizes, device, scored=True)
    plain = resident(sizes, device, scored=False)
    context = dataclasses.replace(sizes, budget=sizes.context, num_layers=1)
    own = resident(context, device, scored=False)
    uneven = resident(sizes, device, scored=True, by_head=True)
    sdpa = full_attention(sizes, device)
    rows = []
    for name, slots, duration in (
        (SCORED, sizes.budget, scored),
        (PLAIN, sizes.budget, plain),
        ("resident, budgets by head", sizes.budget, uneven),
        (CONTEXT, sizes.context, sdpa),
        ("full context, our kernel", sizes.context, own),
    ):
        bandwidth = kv_bytes(sizes, slots) / duration / 1e3
        rows.append(
            {
                "kernel": name,
                "us_per_layer": duration,
                "kv_gb_per_s": bandwidth,
                "of_copy": bandwidth / copy_gb_per_s,
                "times_scored": duration / scored,
            }
        )
    return rows


def kv_bytes(sizes: Sizes, num_slots: int) -> int:
    """K and V that a decode step must read in one layer; nothing else counts."""
    item = getattr(torch, sizes.dtype).itemsize
    row_bytes = sizes.num_kv_heads * num_slots * 2 * sizes.head_size * item
    return sizes.num_rows * row_bytes


def resident(
    sizes: Sizes,
    device: torch.device,
    scored: bool,
    tuning: Tuning | None = None,
    by_head: bool = False,
) -> float:
    """Microseconds per layer of a decode step over full budgets."""
    layout = params_of(sizes).layout
    num_blocks = sizes.num_rows * layout.budget_blocks
    layers = [
        random_pages(num_blocks + 1, sizes, device)
        for _ in range(sizes.num_kv_heads if by_head else sizes.num_layers)
    ]
    params = [params_of(sizes)] * len(layers)
    if by_head:
        parts = uneven_heads(layers, sizes)
        params = [
            dataclasses.replace(p, placements=part)
            for p, part in zip(params, parts, strict=True)
        ]
    table = torch.randperm(num_blocks, device=device).int() + 1
    scratch = DecodeScratch.allocate(
        sizes.num_rows, sizes.num_heads, sizes.num_kv_heads, sizes.head_size,
        sizes.budget, params[0].largest_budget, device, tuning,
    )  # fmt: skip
    placements = None
    if by_head:
        placements = torch.full(
            (sizes.num_rows,), BY_HEAD, dtype=torch.int32, device=device
        )
    rows = ResidentRows(
        table.view(sizes.num_rows, -1),
        torch.full((sizes.num_rows,), 2 * params[0].largest_budget, device=device),
        torch.zeros(sizes.num_rows, dtype=torch.long, device=device),
        scratch,
        placements,
        stay_dense=not scored,
    )
    query = random_tokens(sizes.num_rows, sizes.num_heads, sizes, device)
    key = random_tokens(sizes.num_rows, sizes.num_kv_heads, sizes, device)
    output = torch.empty_like(query)

    def step() -> None:
        for pages, own in zip(layers, params, strict=True):
            decode_resident(query, key, key, pages, rows, own, output)
        rows.positions.add_(1)

    return microseconds(step, device) / len(layers)


def full_attention(sizes: Sizes, device: torch.device) -> float:
    """Microseconds of one layer's decode attention over the full context."""
    shape = (sizes.num_rows, sizes.num_kv_heads, sizes.context, sizes.head_size)
    dtype = getattr(torch, sizes.dtype)
    key = torch.randn(shape, dtype=dtype, device=device)
    value = torch.randn(shape, dtype=dtype, device=device)
    query = random_tokens(sizes.num_rows, sizes.num_heads, sizes, device).unsqueeze(2)
    return microseconds(
        lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        device,
    )


def sweep(sizes: Sizes, device: torch.device, copy_gb_per_s: float) -> list[Row]:
    """The scored step under other tunings, fastest first."""
    tunings = itertools.product((1, 2, 3, 4, 6, 8), (32, 64, 128), (4, 8), (2, 3, 5))
    if device.type == "cpu":
        tunings = itertools.product((2,), (16, 32), (4,), (5,))
    rows = []
    for tuning in itertools.starmap(Tuning, tunings):
        try:
            duration = resident(sizes, device, scored=True, tuning=tuning)
        except Exception as error:
            # triton's OutOfResources has moved between its releases.
            if "out of resource" not in str(error):
                raise
            continue
        bandwidth = kv_bytes(sizes, sizes.budget) / duration / 1e3
        rows.append(
            vars(tuning)
            | {"us_per_layer": duration, "of_copy": bandwidth / copy_gb_per_s}
        )
    return sorted(rows, key=lambda row: row["us_per_layer"])
