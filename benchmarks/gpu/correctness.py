"""The kernels on this device against the reference, with the checks of the tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.prompt import uneven_heads
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.state import random_pages
from tests.attention.triton_checks import (
    check_gate,
    check_scores,
    check_selection,
    check_step,
    check_transition,
    make_prompt,
    make_queries,
)
from tests.attention.triton_chunks import check_chunk_end, check_reading_on
from tests.attention.triton_heads import check_heads
from tests.attention.triton_state import DEVICE, make_step, params_of
from vllm_h2o.attention.ops import LayerParams
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import Mean

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_SIZES = (64, 80, 96, 128, 256)


def check_all(tiny: bool) -> list[dict[str, Any]]:
    """Run every check (if `tiny` the first of each kind), failures and all."""
    results, seen = [], set()
    for name, check in _checks():
        kind = name.split(":")[0]
        if tiny and kind in seen:
            continue
        seen.add(kind)
        error = ""
        try:
            check()
        except Exception as failure:  # the others and the times still count
            text = f"{type(failure).__name__}: {failure}"
            error = " ".join(text.split())[:200]
            print(f"FAILED {name}: {error}", flush=True)
        results.append({"check": name, "ok": not error, "error": error})
    return results


def _checks() -> itertools.chain[tuple[str, Callable[[], Any]]]:
    kinds = (
        _prompts(), _choices(), _steps(), _by_head(), _parts(), _chunks(), _shapes(),
    )  # fmt: skip
    return itertools.chain(*kinds)


def _steps():
    positions = [0, 17, 47, 48, 64, 85]
    for unit, mean, decay, softcap in itertools.product(
        ("token", "block"), (False, True), (1.0, 0.9), (0.0, 5.0)
    ):
        params = params_of(unit, mean, decay, softcap)
        name = f"step {unit}: {mean=} {decay=} {softcap=}"
        yield (
            name,
            lambda params=params: check_step(
                make_step(params, positions, heads=(8, 2))
            ),
        )


def _by_head():
    for dtype, size, layer in itertools.product(_DTYPES, _HEAD_SIZES, range(3)):
        yield (
            f"step by head: {dtype} head {size}, layer {layer}",
            lambda d=dtype, s=size, i=layer: check_heads(
                i, [5, 47, 48, 60, 79, 80, 137, -1], d, s
            ),
        )


def _parts():
    """Queries that read a part of the pages, in pages of other layers too."""
    for dtype, layer in zip(_DTYPES, range(3), strict=True):
        yield (
            f"step that reads a part: {dtype}, layer {layer}",
            lambda d=dtype, i=layer: check_heads(
                i, [5, 47, 48, 64, 80, 137, -1], d, 128, read=0.3
            ),
        )


def _chunks():
    """Chunks beside what heads hold, and their ends, of budgets that have grown too."""
    dtypes = *_DTYPES, torch.int8
    for dtype, layer, grown_at in itertools.product(dtypes, range(3), (0, 90, 100)):
        yield (
            f"chunk: {dtype}, layer {layer}, {grown_at=}",
            lambda d=dtype, i=layer, g=grown_at: check_reading_on(i, d, g),
        )
    for dtype, gated, grown_at in itertools.product(dtypes, (False, True), (0, 90)):
        yield (
            f"chunk's end: {dtype}, {gated=}, {grown_at=}",
            lambda d=dtype, by=gated, g=grown_at: check_chunk_end(d, Mean(), by, g),
        )


def _shapes():
    for dtype, size in itertools.product(_DTYPES, _HEAD_SIZES):
        yield (
            f"step: {dtype} head {size}",
            lambda d=dtype, s=size: check_step(
                make_step(params_of(mean=True), [50, 77], d, (4, 2), s)
            ),
        )
    for group in range(1, 17):
        yield (
            f"step: {group} query heads",
            lambda group=group: check_step(
                make_step(params_of(), [60], torch.bfloat16, (group, 1), 128)
            ),
        )
    for block in (16, 32, 64, 128):
        params = params_of(block_size=block, heavy_slots=block, recent_slots=block)
        yield (
            f"step: blocks of {block}",
            lambda params=params, block=block: check_step(
                make_step(params, [5, 3 * block + 1], torch.bfloat16, (4, 1), 128),
                tile_slots=64,
            ),
        )


def _choices():
    """Prompts up to 128k, few and many distinct scores, budgets by head too."""
    for tokens, distinct in itertools.product((2049, 32768, 131072), (1, 64, 2**20)):
        for unit in ("token", "block", "by head"):
            yield (
                f"selection {unit}: {tokens} tokens, {distinct} scores",
                lambda n=tokens, d=distinct, u=unit: _check_choice(n, d, u),
            )


def _check_choice(num_tokens: int, distinct: int, unit: str) -> None:
    config = H2OConfig(eviction_unit="block" if unit == "block" else "token")
    if unit == "block":
        # The order of a sum's terms does not matter to quarters.
        config = dataclasses.replace(config, score="sum")
    layout = SlotLayout.of_blocks(config, FULL.block_size, 128)
    params = LayerParams(layout, 1.0, 0.0, config.method)
    if unit == "by head":
        layers = [random_pages(1, FULL, DEVICE)] * FULL.num_kv_heads
        parts = uneven_heads(layers, FULL)
        params = dataclasses.replace(params, placements=parts[0])
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (FULL.num_kv_heads, num_tokens)
    scores = torch.randint(0, distinct, shape, generator=generator).to(DEVICE) / 4
    placement = BY_HEAD if unit == "by head" else UNIFORM
    check_selection(scores, placement, num_tokens - FULL.window, config, params)


def _prompts():
    layout = SlotLayout(16, 32, 48, sinks=4, whole_blocks=False)
    yield "window", lambda: check_scores(make_prompt(149), make_queries(64, 8), 149)
    for dtype, size in itertools.product(_DTYPES, _HEAD_SIZES):
        yield (
            f"gate: {dtype} head {size}",
            lambda d=dtype, s=size: check_gate(make_prompt(149, d, 2, s)),
        )
    yield "transition", lambda: check_transition(141, H2OConfig(), layout)
    yield (
        "all queries",
        lambda: check_scores(make_prompt(300), make_queries(300, 4), 300),
    )
    for dtype, size in itertools.product(_DTYPES, _HEAD_SIZES):
        yield (
            f"window: {dtype} head {size}",
            lambda d=dtype, s=size: check_scores(
                make_prompt(90, d, 2, s), make_queries(33, 4, s, d), 90
            ),
        )
        yield (
            f"transition: {dtype} head {size}",
            lambda d=dtype, s=size: check_transition(141, H2OConfig(), layout, d, s),
        )
