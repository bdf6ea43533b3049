"""What is done to resident rows: the contract, and the choice of a kernel."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from vllm_h2o.attention.ops.types import (
    DecodeParams,
    Kept,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import State, starts_at_zero
from vllm_h2o.policy.options import shown

__all__ = [
    "KERNELS", "Kept", "DecodeParams", "ResidentRows", "ScoredLayer",
    "attend_observed", "decode_resident", "observe", "runs_reference",
    "score_by_gate", "start", "transition",
]  # fmt: skip

KERNELS = "VLLM_H2O_KERNELS"
"""Environment variable: `reference` runs everything in plain torch, on CPU."""


def runs_reference() -> bool:
    """Whether plain torch runs in place of the kernels, as `VLLM_H2O_KERNELS` says.

    Raises:
        ValueError: It says something else.
    """
    named = os.environ.get(KERNELS, "")
    if named not in ("", "reference"):
        raise ValueError(
            f"{KERNELS} is {shown(named)}: unset it, or set it to 'reference', which "
            "runs plain torch in place of the kernels, slowly"
        )
    return named == "reference"


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
    _kernel(query).decode_resident(query, key, value, pages, rows, params, output)


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    placement: int,
    first_query: int,
    config: H2OConfig,
) -> None:
    """Select what each KV head of each layer keeps, and copy it into its slots.

    The two halves are `reference.select` and `reference.copy_kept`, layer by layer.
    Sources may be overwritten: all of a head is read before anything of it is written.

    Args:
        layers: The layers; each has seen the request's tokens get attention of its own.
        source_blocks: int32 blocks, the token at position p in block
            `p // block_size`, offset `p % block_size`.
        target_blocks: `[>= cdiv(min(tokens, budget), block_size)]` int32 resident
            blocks; the very tensor `source_blocks` if a request is rearranged in its
            blocks.
        placement: Index of how the slots are split.
        first_query: Position of the first query that scored.
        config: The policy.
    """
    kernel = _kernel(layers[0].pages.keys)
    kernel.transition(
        layers, source_blocks, target_blocks, placement, first_query, config
    )


def start(
    pages: Pages,
    dense_blocks: torch.Tensor,
    first: int,
    end: int,
    state: State,
    params: DecodeParams,
) -> None:
    """Give prompt tokens the state that the method starts them with, if not 0.

    Args:
        pages: The layer's pages, read only.
        dense_blocks: `[>= cdiv(end, block_size)]` int32 blocks of the prompt.
        first: Position of the first of the tokens.
        end: Behind the last.
        state: `[num_kv_heads, >= end]` float32 for each of the method's fields, of
            which `first .. end - 1` are written.
        params: The layer's constants.
    """
    if not starts_at_zero(params.method):  # which only the reference runs
        _kernel(pages.keys).start(pages, dense_blocks, first, end, state, params)


def score_by_gate(
    layers: Sequence[ScoredLayer], dense_blocks: torch.Tensor, first_query: int
) -> None:
    """Write the attention that a prompt's tokens are expected to get, of each layer.

    The formula is that of `vllm_h2o.attention.gate`.

    Args:
        layers: Layers with a gate, of one prompt; the attention is written.
        dense_blocks: `[>= cdiv(num_tokens, block_size)]` int32 blocks of the prompt.
        first_query: Position of the first query that the expectation stands for.

    Raises:
        ValueError: A dtype or head size that no kernel has.
    """
    _kernel(layers[0].pages.keys).score_by_gate(layers, dense_blocks, first_query)


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: DecodeParams,
) -> None:
    """Add the attention of consecutive prompt queries to the prompt's state.

    The formula is the method's (`vllm_h2o.policy.methods`).

    Args:
        query: `[m, num_heads, head_size]`, queries at positions
            `first_position ..+ m`, after RoPE.
        pages: The layer's pages, read only.
        dense_blocks: `[>= cdiv(first_position + m, block_size)]` int32 blocks of
            the prompt.
        first_position: Position of `query[0]`.
        state: `[num_kv_heads, >= first_position + m]` float32 for each of the method's
            fields, of earlier queries; what none of them saw is as it was started
            (see `start`; 0 for what has a kernel). Updated in place.
        params: The layer's constants.

    Raises:
        ValueError: A dtype or head size that no kernel has.
    """
    _kernel(query).observe(query, pages, dense_blocks, first_position, state, params)


def attend_observed(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    first_scoring: int,
    state: State,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """`observe`, and the attention's output from the same pass over the keys.

    For steps in which most queries score, which the stock kernel and `observe` would
    both compute the logits of. On CPU only.

    Args:
        query: `[m, num_heads, head_size]`, see `observe`.
        pages: The layer's pages, read only.
        dense_blocks: See `observe`.
        first_position: Position of `query[0]`.
        first_scoring: Index of the first query that scores; those before it attend.
        state: See `observe`.
        params: The layer's constants.
        output: `[m, num_heads, head_size]`, written.

    Raises:
        ValueError: A dtype or head size that no kernel has.
    """
    _kernel(query).attend_observed(
        query, pages, dense_blocks, first_position, first_scoring, state, params,
        output,
    )  # fmt: skip


def _kernel(tensor: torch.Tensor) -> ModuleType:
    """The kernels of the tensor's device, unless the reference is asked for."""
    name = "reference" if runs_reference() else "cpu" if tensor.is_cpu else "triton"
    return importlib.import_module(f"vllm_h2o.attention.ops.{name}")
