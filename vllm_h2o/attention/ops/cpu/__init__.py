"""The C kernels, called by ctypes; `library` builds and keeps them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_h2o.attention.ops import (
    Capability,
    DraftLog,
    Held,
    Kept,
    LayerParams,
    LoggedLayer,
    ResidentRows,
    ScoredLayer,
    reference,
)
from vllm_h2o.attention.ops.cpu import library
from vllm_h2o.attention.ops.cpu.args import (
    FORMS,
    DecodeArgs,
    GateArgs,
    ObserveArgs,
    TransitionArgs,
    layer_args,
    set_gate_args,
    set_log,
    set_rows,
)
from vllm_h2o.attention.ops.reference import (
    compress_chunk,
    move_keys,
    read_on,
    start,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import State

__all__ = [
    "CAPABILITIES", "FORMS", "Selection", "attend_observed", "build", "check_supported",
    "compress_chunk", "copy_kept", "decode_resident", "move_keys", "observe",
    "order_rings", "read_on", "score_by_gate", "select", "start", "take_back",
    "transition",
]  # fmt: skip

CAPABILITIES = frozenset(Capability) - {Capability.TORCH}
"""All, but reading a part and merging one at a time."""
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


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
    """See `Kernels.decode_resident`."""
    num_heads, head_size = query.shape[1:]
    layout = params.layout
    check_supported(query.dtype, head_size, layout.block_size)
    assert pages.quantized or pages.keys.dtype == query.dtype
    for tensor in (query, key, value, output):
        assert tensor.dtype == query.dtype
        assert tensor.stride(1) == head_size and tensor.stride(2) == 1
    args = layer_args(pages, params, DecodeArgs)
    set_rows(args, rows)
    if log is not None:
        assert params.fused_form and not (params.merge or layout.whole_blocks)
        assert params.read == 1.0, "the bound of a page could not be taken back"
        set_log(args, log)
    args.query = query.data_ptr()
    args.key = key.data_ptr()
    args.value = value.data_ptr()
    args.output = output.data_ptr()
    args.num_heads = num_heads
    args.query_stride = query.stride(0)
    args.key_stride = key.stride(0)
    args.value_stride = value.stride(0)
    args.output_stride = output.stride(0)
    if _function("decode", query.dtype, pages)(ctypes.byref(args)):
        raise MemoryError("the H2O decode kernel could not allocate its scratch")


def take_back(
    layers: Sequence[LoggedLayer], rows: ResidentRows, refused: torch.Tensor
) -> None:
    """See `Kernels.take_back`."""
    assert refused.dtype == torch.int32 and refused.is_contiguous()
    all_args = (DecodeArgs * len(layers))()
    for i, (pages, params, log) in enumerate(layers):
        args = layer_args(pages, params, DecodeArgs)
        set_rows(args, rows)
        set_log(args, log)
        args.refused = refused.data_ptr()
        all_args[i] = args
    pages = layers[0].pages
    _run(_function("take_back", pages.keys.dtype, pages), "take_back", all_args)


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    held: Held,
    first_query: int,
    config: H2OConfig,
) -> None:
    """See `Kernels.transition`.

    The heads of all layers share out the threads: heads with budgets of their own
    have very different amounts of work. What is dropped is merged in torch.
    """
    selection = select(layers, held.placement, first_query, config)
    if not layers[0].params.merge:
        copy_kept(layers, source_blocks, held.pages, selection)
        return
    for i, layer in enumerate(layers):  # one at a time: merged values take memory
        pages, kept = layer.pages, Kept(*selection.tokens[:, i])
        merges = reference.merge_dropped(layer.source, source_blocks, kept, layer.state)
        copy_kept([layer], source_blocks, held.pages, selection.of_layer(i))
        reference.put_merged(
            pages, held.pages, held.placement, kept, merges, layer.params
        )


@dataclass(frozen=True)
class Selection:
    """What each KV head of each layer keeps of a request.

    Attributes:
        tokens: `[2, num_layers, num_kv_heads, most]` int64, contiguous: positions and
            slots of the tokens, see `Kept`.
        row: `[1]` int64: the first query's position; and `[1]` int32: the placement.
        args: The kernels' arguments by layer, which point to all this.
    """

    tokens: torch.Tensor
    row: tuple[torch.Tensor, torch.Tensor]
    args: ctypes.Array[TransitionArgs]

    def of_layer(self, i: int) -> Selection:
        """The selection of one layer alone."""
        args = (TransitionArgs * 1)(self.args[i])
        return Selection(self.tokens[:, i : i + 1], self.row, args)


def select(
    layers: Sequence[ScoredLayer], placement: int, first_query: int, config: H2OConfig
) -> Selection:
    """See `reference.select`, of every layer.

    Torch chooses whole blocks, and by methods whose form for prompts the kernels lack.
    """
    selection = _no_selection(layers, placement, first_query, config.prompt_pooling)
    params = layers[0].params
    if params.fused_prompt_form and not params.layout.whole_blocks:
        _run(_library().h2o_select, "select", selection.args)
        return selection
    selection.tokens.fill_(-1)
    for layer, tokens in zip(layers, selection.tokens.unbind(1), strict=True):
        kept = reference.select(
            layer.state, placement, first_query, config, layer.params
        )
        tokens[0, :, : kept.positions.shape[1]] = kept.positions
        tokens[1, :, : kept.slots.shape[1]] = kept.slots
    return selection


def _no_selection(
    layers: Sequence[ScoredLayer], placement: int, first_query: int, pooling: int
) -> Selection:
    """Room for a selection, and arguments that point to it."""
    num_kv_heads, num_tokens = layers[0].state["attention"].shape
    most = min(num_tokens, max(layer.params.largest_budget for layer in layers))
    tokens = torch.empty(2, len(layers), num_kv_heads, most, dtype=torch.int64)
    row = torch.tensor([first_query]), torch.tensor([placement], dtype=torch.int32)
    all_args = (TransitionArgs * len(layers))()
    positions, slots = (part.data_ptr() for part in tokens)
    step = tokens.stride(1) * tokens.element_size()
    for i, layer in enumerate(layers):
        attention, args = layer.state["attention"], all_args[i]
        assert attention.shape == (num_kv_heads, num_tokens)
        assert attention.dtype == torch.float32 and attention.is_contiguous()
        args.target = layer_args(layer.pages, layer.params, DecodeArgs)
        args.target.num_rows = 1
        # Any position: nothing is asked of it.
        args.target.positions = args.target.first_queries = row[0].data_ptr()
        args.target.placements = row[1].data_ptr()
        args.target.budget = layer.params.budget_of(placement)
        args.positions, args.slots = positions + i * step, slots + i * step
        args.attention = attention.data_ptr()
        args.num_tokens, args.most, args.pooling = num_tokens, most, pooling
    return Selection(tokens, row, all_args)


def copy_kept(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    selection: Selection,
) -> None:
    """See `reference.copy_kept`, of every layer."""
    for blocks in (source_blocks, target_blocks):
        assert blocks.dtype == torch.int32 and blocks.stride(0) == 1
    source, target = source_blocks.data_ptr(), target_blocks.data_ptr()
    for args, layer in zip(selection.args, layers, strict=True):
        args.target.block_table = target
        args.source_blocks, args.source_cache = source, layer.source.keys.data_ptr()
        args.source_block_size = layer.source.block_size
        args.source_page_stride = layer.source.page_stride
        args.in_place = source == target
        assert not args.in_place or layer.source is layer.pages
    function = _function("copy_kept", layers[0].source.keys.dtype, layers[0].pages)
    _run(function, "copy_kept", selection.args)


def order_rings(layers: Sequence[ScoredLayer], held: Held) -> None:
    """See `Kernels.order_rings`."""
    blocks = held.pages
    assert blocks.dtype == torch.int32 and blocks.stride(0) == 1
    counts = torch.tensor([held.num_tokens, held.grown_at])
    index = torch.tensor([held.placement], dtype=torch.int32)
    all_args = (TransitionArgs * len(layers))()
    for args, layer in zip(all_args, layers, strict=True):
        args.target = layer_args(layer.pages, layer.params, DecodeArgs)
        args.target.block_table = blocks.data_ptr()
        args.target.positions = args.target.first_queries = counts[:1].data_ptr()
        args.target.placements = index.data_ptr()
        args.target.grown_at = counts[1:].data_ptr()
    function = _function("order_rings", layers[0].pages.keys.dtype, layers[0].pages)
    _run(function, "order_rings", all_args)


def _run(function: Any, name: str, args: ctypes.Array[Any]) -> None:
    """Call a kernel that takes the arguments of all layers."""
    if function(args, ctypes.c_int64(len(args))):
        raise MemoryError(f"the H2O {name} kernel could not allocate its scratch")


def score_by_gate(
    layers: Sequence[ScoredLayer], dense_blocks: torch.Tensor, first_query: int
) -> None:
    """See `Kernels.score_by_gate`."""
    assert dense_blocks.dtype == torch.int32 and dense_blocks.stride(0) == 1
    keys = layers[0].source.keys
    check_supported(keys.dtype, keys.shape[2], keys.shape[3])
    all_args = (GateArgs * len(layers))()
    for args, layer in zip(all_args, layers, strict=True):
        set_gate_args(args, layer)
        args.blocks, args.first_query = dense_blocks.data_ptr(), first_query
        args.num_threads = torch.get_num_threads()
    _run(_function("gate", keys.dtype), "gate", all_args)


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: LayerParams,
) -> None:
    """See `Kernels.observe`."""
    if params.fused_prompt_form is None:
        reference.observe(query, pages, dense_blocks, first_position, state, params)
        return
    attend_observed(query, pages, dense_blocks, first_position, 0, state, params, None)


def attend_observed(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    first_scoring: int,
    state: State,
    params: LayerParams,
    output: torch.Tensor | None,
) -> None:
    """See `Kernels.attend_observed`; None: nobody wants the output."""
    attention = state["attention"]
    num_queries, num_heads, head_size = query.shape
    _, num_kv_heads, _, block_size = pages.keys.shape
    num_tokens = first_position + num_queries
    check_supported(query.dtype, head_size, block_size)
    assert pages.keys.dtype == query.dtype
    for tensor in (query, query if output is None else output):
        assert tensor.dtype == query.dtype
        assert tensor.stride(1) == head_size and tensor.stride(2) == 1
    assert dense_blocks.dtype == torch.int32 and dense_blocks.stride(0) == 1
    assert len(dense_blocks) * block_size >= num_tokens
    assert attention.dtype == torch.float32 and attention.stride(1) == 1
    assert attention.shape[0] == num_kv_heads and attention.shape[1] >= num_tokens
    if params.score_decay != 1.0:
        attention.mul_(params.score_decay ** (num_queries - first_scoring))
    args = layer_args(pages, params, ObserveArgs)
    args.query = query.data_ptr()
    args.blocks = dense_blocks.data_ptr()
    args.attention = attention.data_ptr()
    args.num_queries = num_queries
    args.num_heads = num_heads
    args.query_stride = query.stride(0)
    args.attention_stride = attention.stride(0)
    args.first_position = first_position
    args.first_scoring = first_scoring
    if output is not None:
        args.output, args.output_stride = output.data_ptr(), output.stride(0)
    if _function("observe", query.dtype)(ctypes.byref(args)):
        raise MemoryError("the H2O observe kernel could not allocate its scratch")


def check_supported(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Raise ValueError for what the kernel does not have."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"H2O on CPU has no kernel for dtype {dtype} (--dtype): "
            "use float32, bfloat16 or float16"
        )
    if head_size % 16 or block_size % 16:
        raise ValueError(
            f"H2O on CPU needs a head size ({head_size}) and a --block-size "
            f"({block_size}) that are multiples of 16: use --block-size 32, or another "
            "model"
        )


def _function(name: str, dtype: torch.dtype, pages: Pages | None = None):
    """A kernel by the type of what is not in `pages`, resident ones."""
    if pages is None or not pages.quantized:
        return getattr(_library(), f"h2o_{name}_{_DTYPES[dtype]}")
    # Of what stays in int8 pages the type is no matter.
    of = _DTYPES.get(dtype, "float32")
    return getattr(_library(quantized=True), f"h2o_{name}_{of}")


@functools.cache
def _library(quantized: bool = False) -> ctypes.CDLL:
    return library.load(*["-DH2O_INT8"] * quantized)


def build(dtype: torch.dtype, quantized: bool = False) -> None:
    """Build (if needed) and load the kernels, so that no request waits for them.

    Args:
        dtype: Of the model.
        quantized: Whether resident pages are int8.

    Raises:
        RuntimeError: See `library.load`.
        ValueError: The library has no kernel for `dtype`.
    """
    if quantized:
        _library(quantized=True)
    if not hasattr(_library(), f"h2o_decode_{_DTYPES[dtype]}"):
        raise ValueError(
            f"H2O's kernels were built without {_DTYPES[dtype]} (--dtype), which "
            f"{library.compiler_name()} does not have: set CC to gcc 12 or newer, "
            "or use --dtype bfloat16"
        )
