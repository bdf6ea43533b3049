"""Reading on: rows whose prompt goes on beside what is held of its earlier chunks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from vllm_h2o.attention.ops import Chunk, DecodeParams, ScoredLayer
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.transition import Transitions
from vllm_h2o.policy.chunks import first_scoring
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.life import RowPlan


@dataclass
class ReadingRow:
    """A row that reads tokens of a chunk that is not its prompt's first.

    Attributes:
        request_id: The request.
        transitions: The engine's.
        tokens: The row's tokens in the batch.
        plan: The row's counts.
        chunk: The chunk.
        layers: Layers that have run and are to be compressed.
    """

    request_id: str
    transitions: Transitions
    tokens: slice
    plan: RowPlan
    chunk: Chunk
    layers: list[ScoredLayer] = field(default_factory=list)

    @property
    def dense_blocks(self) -> torch.Tensor:
        """Of the chunk, see `Chunk.blocks`."""
        return self.chunk.blocks


def chunk_of(
    row: RowPlan,
    config: H2OConfig,
    blocks: torch.Tensor,
    resident_pages: torch.Tensor,
    placement: int,
) -> Chunk:
    """The chunk that a row reads.

    Args:
        row: Its counts.
        config: The policy.
        blocks: See `Chunk`.
        resident_pages: See `Chunk.resident`.
        placement: Index of how its slots are split.
    """
    return Chunk(
        row.chunk_start,
        row.chunk_end,
        first_scoring(row.chunk_start, row.first_query, config.gated),
        row.scored_from,
        row.first_query,
        blocks,
        resident_pages,
        placement,
        row.grown_at,
    )


def read_on(
    query: torch.Tensor,
    dense: Pages,
    pages: Pages,
    row: ReadingRow,
    layer_name: str,
    config: H2OConfig,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """Attend in a layer; in the chunk's last step its compression is due.

    Args:
        query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
            keys and values are in the dense blocks already.
        dense: The layer's pages as vLLM has them, read only.
        pages: Those of resident blocks.
        row: The row.
        layer_name: Whose state of earlier steps this is.
        config: The policy.
        params: The layer's constants.
        output: `[num_tokens, num_heads, head_size]`, written.
    """
    plan, kernels = row.plan, params.kernels
    assert kernels is not None
    partial = row.transitions.partial_states(row.request_id)
    state = partial.pop(layer_name, {})
    if plan.num_computed_tokens == plan.chunk_start:
        state = {}
    kernels.read_on(
        query, plan.num_computed_tokens, dense, pages, row.chunk, state, params, output
    )
    if not plan.is_transition:
        partial[layer_name] = state
        return
    row.layers.append(ScoredLayer(pages, state, params, dense))
    row.transitions.collect(row, functools.partial(_compress, row, config))


def _compress(row: ReadingRow, config: H2OConfig) -> None:
    kernels = row.layers[0].params.kernels
    assert kernels is not None
    kernels.compress_chunk(row.layers, row.chunk, config)
    row.layers.clear()
