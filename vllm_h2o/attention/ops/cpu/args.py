"""Arguments of the C kernels: mirrors of the structures in csrc/decode.c."""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from vllm_h2o.attention.ops.types import (
    DraftLog,
    LayerParams,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.layout import floats_of_page, state_bytes
from vllm_h2o.policy.quantization import NUM_SCALES

FORMS = frozenset({"sum", "mean"})
"""Methods that the kernels have, by `fused_form`."""


def _fields(
    pointers: str, integers: str, floats: str = "", doubles: str = ""
) -> list[tuple[str, Any]]:
    """Of a structure that has them in this order."""
    kinds = (
        (pointers, ctypes.c_void_p),
        (integers, ctypes.c_int64),
        (floats, ctypes.c_float),
        (doubles, ctypes.c_double),
    )
    return [(name, kind) for names, kind in kinds for name in names.split()]


class DecodeArgs(ctypes.Structure):
    """Mirror of `h2o_decode_args` in decode.c."""

    _fields_ = _fields(
        "query key value output cache block_table positions first_queries placements "
        "grown_at "
        "head_sizes head_offsets head_columns head_order sink_logits "
        "counts starts refused "
        "log_keys log_values log_scales log_births log_losers log_attention",
        "num_rows num_heads num_kv_heads head_size block_size "
        "query_stride key_stride value_stride output_stride "
        "block_table_stride page_stride page_bytes state_offset "
        "most_drafts log_slots "
        "budget heavy_slots pinned_slots head_blocks largest_budget "
        "whole_blocks score_mean merges num_threads",
        "scale softcap score_decay",
        "read",
    )


class TransitionArgs(ctypes.Structure):
    """Mirror of `h2o_transition_args` in decode.c."""

    _fields_ = [
        ("target", DecodeArgs),
        *_fields(
            "source_blocks source_cache positions slots attention",
            "source_block_size source_page_stride num_tokens most pooling in_place",
        ),
    ]


class ObserveArgs(ctypes.Structure):
    """Mirror of `h2o_observe_args` in decode.c."""

    _fields_ = _fields(
        "query cache blocks attention output sink_logits",
        "num_queries num_heads num_kv_heads head_size block_size "
        "query_stride output_stride attention_stride page_stride "
        "first_position first_scoring num_threads",
        "scale softcap score_decay",
    )


class GateArgs(ctypes.Structure):
    """Mirror of `h2o_gate_args` in decode.c."""

    _fields_ = _fields(
        "cache blocks weights angles attention",
        "num_tokens first_query group num_kv_heads head_size block_size "
        "page_stride num_positions rotary_dim neox unknown floats num_threads",
    )


_Kind = TypeVar("_Kind", DecodeArgs, ObserveArgs)


_LAYER_ARGS: WeakKeyDictionary[
    Pages, WeakKeyDictionary[LayerParams, dict[type, ctypes.Structure]]
] = WeakKeyDictionary()


def layer_args(pages: Pages, params: LayerParams, kind: type[_Kind]) -> _Kind:
    """A kernel's arguments with a layer's constants in, the others zero.

    Copied from what is made once: making it in every step would take as long as a
    small kernel.
    """
    of_pages = _LAYER_ARGS.get(pages)
    if of_pages is None:
        of_pages = _LAYER_ARGS[pages] = WeakKeyDictionary()
    made = of_pages.get(params)
    if made is None:
        slots = _make_slot_args(pages, params)
        made = {DecodeArgs: slots, ObserveArgs: _make_observe_args(slots)}
        of_pages[params] = made
    args: Any = kind.from_buffer_copy(made[kind])
    args.num_threads = torch.get_num_threads()
    return args


def set_rows(args: DecodeArgs, rows: ResidentRows) -> None:
    """Where rows and their slots are."""
    table, placements = rows.block_table, rows.placements
    assert table.dtype == torch.int32 and table.stride(1) == 1
    args.num_rows, args.block_table_stride = len(rows.positions), table.stride(0)
    args.block_table = table.data_ptr()
    assert rows.positions.is_contiguous() and rows.first_queries.is_contiguous()
    args.positions = rows.positions.data_ptr()
    args.first_queries = rows.first_queries.data_ptr()
    if placements is not None:
        assert placements.dtype == torch.int32 and placements.is_contiguous()
        args.placements = placements.data_ptr()
        if rows.grown_at is not None:
            assert rows.grown_at.dtype == torch.int64
            assert rows.grown_at.is_contiguous()
            args.grown_at = rows.grown_at.data_ptr()
    if rows.counts is not None and rows.starts is not None:
        for counts in (rows.counts, rows.starts):
            assert counts.dtype == torch.int32 and counts.is_contiguous()
        args.counts, args.starts = rows.counts.data_ptr(), rows.starts.data_ptr()


def set_log(args: DecodeArgs, log: DraftLog) -> None:
    """Where what drafts change is noted."""
    _, args.most_drafts, _, args.log_slots = log.attention.shape
    args.log_keys, args.log_values = log.keys.data_ptr(), log.values.data_ptr()
    if log.scales is not None:
        args.log_scales = log.scales.data_ptr()
    args.log_births, args.log_losers = log.births.data_ptr(), log.losers.data_ptr()
    args.log_attention = log.attention.data_ptr()


def _make_slot_args(pages: Pages, params: LayerParams) -> DecodeArgs:
    layout, own = params.layout, params.placements
    assert params.fused_form in FORMS, params.method
    args = DecodeArgs(
        cache=pages.keys.data_ptr(),
        num_kv_heads=pages.keys.shape[1],
        head_size=pages.keys.shape[2],
        block_size=pages.block_size,
        page_stride=pages.page_stride,
        page_bytes=pages.page_bytes,
        state_offset=pages.state_offset,
        budget=layout.budget,
        largest_budget=params.largest_budget,
        heavy_slots=layout.heavy_slots,
        pinned_slots=layout.pinned_slots,
        whole_blocks=layout.whole_blocks,
        score_mean=params.fused_form == "mean",
        merges=params.merge,
        scale=params.scale,
        softcap=params.softcap,
        score_decay=params.score_decay,
        read=params.read,
    )
    assert not (params.merge and (params.read < 1.0 or layout.whole_blocks))
    assert not (pages.quantized and (params.merge or layout.whole_blocks))
    _, num_kv_heads, head_size, block_size = pages.keys.shape
    if pages.state:
        floats = floats_of_page(head_size, block_size, params.read < 1.0, params.merge)
        num_fields = 1 + NUM_SCALES * pages.quantized
        state = state_bytes(num_kv_heads, block_size, num_fields, floats)
        needed = pages.state_offset + state
        assert pages.page_bytes >= needed, "a page is too small"
    if (sinks := params.sink_logits) is not None:
        assert sinks.dtype == torch.float32 and sinks.is_contiguous()
        args.sink_logits = sinks.data_ptr()
    if own is not None:
        assert not layout.whole_blocks
        args.head_sizes = own.sizes.data_ptr()
        args.head_offsets = own.offsets.data_ptr()
        args.head_columns = own.columns.data_ptr()
        args.head_order = own.order.data_ptr()
        args.head_blocks = own.columns.shape[2]
    return args


def _make_observe_args(slots: DecodeArgs) -> ObserveArgs:
    """What both structures have."""
    names = {name for name, _ in ObserveArgs._fields_} & {
        f[0] for f in DecodeArgs._fields_
    }
    return ObserveArgs(**{name: getattr(slots, name) for name in names})


def set_gate_args(args: GateArgs, layer: ScoredLayer) -> None:
    """What is the layer's of them."""
    pages, gate, attention = layer.source, layer.params.gate, layer.state["attention"]
    _, args.num_kv_heads, args.head_size, args.block_size = pages.keys.shape
    args.cache, args.page_stride = pages.keys.data_ptr(), pages.page_stride
    args.num_tokens = attention.shape[1]
    assert attention.shape[0] == args.num_kv_heads
    assert attention.dtype == torch.float32 and attention.is_contiguous()
    args.attention = attention.data_ptr()
    assert gate is not None and gate.weights.is_contiguous()
    assert gate.weights.dtype == torch.float32
    assert gate.weights.shape == (args.num_kv_heads, 2 * args.head_size + 4)
    args.weights, args.group = gate.weights.data_ptr(), gate.group
    if gate.rotation is None:
        return
    angles = gate.rotation.angles
    args.unknown = angles is None or len(angles) < args.num_tokens
    if angles is None or args.unknown:
        return
    args.floats = angles.dtype == torch.float32
    assert args.floats or angles.dtype == pages.keys.dtype
    assert angles.is_contiguous()
    args.angles, args.neox = angles.data_ptr(), gate.rotation.neox
    args.num_positions, args.rotary_dim = angles.shape
