"""Transitions: prompts are scored while they are read, and compressed when they end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from vllm_h2o.attention.ops import DecodeParams, ScoredLayer
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import RequestPlacements
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.methods import State, starts_at_zero

PartialStates = dict[str, State]
"""Of a prompt whose observation window spans steps, by layer name."""


@dataclass
class ObservedPrompt:
    """A prefilling row with observation queries or its transition in this step.

    Attributes:
        request_id: The request.
        transitions: The engine's.
        tokens: The row's tokens in the batch.
        plan: The row's counts.
        dense_blocks: `[cdiv(seq_len, block_size)]` int32 block ids.
        resident_pages: `[num_resident]` int32 pages of resident blocks in the
            transition step, else None.
        place: Returns the index of the placement that the transition is to, by the
            layers that are due.
        attends: Whether our kernel attends too; else stock's has done so.
        layers: Layers that have run and are to be compressed.
    """

    request_id: str
    transitions: Transitions
    tokens: slice
    plan: RowPlan
    dense_blocks: torch.Tensor
    resident_pages: torch.Tensor | None
    place: Callable[[list[ScoredLayer]], int]
    attends: bool
    layers: list[ScoredLayer] = field(default_factory=list)


class _Ending(Protocol):
    """A row whose layers are compressed: `ObservedPrompt`, or one that reads on."""

    @property
    def request_id(self) -> str: ...
    @property
    def dense_blocks(self) -> torch.Tensor: ...
    @property
    def layers(self) -> list[ScoredLayer]: ...


class Transitions:
    """What is due of an engine's requests, and what they need until then.

    Attributes:
        by_request: The placements of requests that split their slots each in its own
            way; None where none does.
        seconds: That transitions between steps have taken; for whoever takes them out.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self.by_request: RequestPlacements | None = None
        self.seconds: list[float] = []
        self._due: dict[str, list[Callable[[], None]]] = {}
        self._partial: dict[str, PartialStates] = {}

    def partial_states(self, request_id: str) -> PartialStates:
        """State of earlier steps of a prompt; each layer takes its own out."""
        return self._partial.setdefault(request_id, {})

    def collect(self, row: _Ending, compress: Callable[[], None]) -> None:
        """Take in a layer of a prompt that has ended, and compress it when it is time.

        On CPU that is between this step and the next, all layers at once: the first
        token does not wait for it, and the heads of all layers share out the threads.
        A GPU's launches gain nothing by that, and its memory for scores is dear: there
        each layer is compressed at once.

        Args:
            row: The row, in its transition step, with the layer as its last.
            compress: Compresses the layers that the row has until then.
        """
        if not row.dense_blocks.is_cpu:
            compress()
        elif len(row.layers) == 1:
            self._due.setdefault(row.request_id, []).append(compress)

    def run(self) -> None:
        """Run what the last step put off.

        Freed blocks may have new owners, but these write only in the step that begins
        now.
        """
        if not self._due:
            return  # most steps; inference mode takes longer than all else here
        with torch.inference_mode():
            for request_id in list(self._due):
                start, due = time.perf_counter(), self._due.pop(request_id)
                for work in due:
                    work()
                self.seconds.append(time.perf_counter() - start)

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished, or whose prompt is read again."""
        self._partial.pop(request_id, None)
        self._due.pop(request_id, None)
        if self.by_request:
            self.by_request.drop(request_id)

    def clear(self) -> None:
        """Forget all requests: the KV cache goes."""
        self._due.clear()
        self._partial.clear()
        self.by_request = None


def observe_prompt(
    query: torch.Tensor,
    dense: Pages,
    pages: Pages,
    prompt: ObservedPrompt,
    layer_name: str,
    config: H2OConfig,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """Score the prompt with this step's queries, if any; in its last step it is due.

    Args:
        query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
            keys and values are in the dense blocks already.
        dense: The layer's pages as vLLM has them, read only.
        pages: Those of resident blocks.
        prompt: The row.
        layer_name: Whose state of earlier steps this is.
        config: The policy.
        params: The layer's constants.
        output: `[num_tokens, num_heads, head_size]` attention of the row's queries,
            written if the stock kernel has not done so.
    """
    plan = prompt.plan
    if config.gated:
        assert params.gate is not None, "the worker gives it before the cache"
        _compress_by_gate(dense, pages, prompt, config, params)
        return
    first_scoring = max(plan.num_computed_tokens, plan.first_query)
    partial = prompt.transitions.partial_states(prompt.request_id)
    state = partial.pop(layer_name, None)
    new = plan.num_computed_tokens
    if state is None or first_scoring == plan.first_query:
        # The first step with observation queries, also after a restart.
        shape, new = (pages.keys.shape[1], plan.chunk_end), 0
        fields = (*pages.state, *params.method.prompt_fields)
        state = {name: torch.zeros(shape, device=query.device) for name in fields}
    end = plan.num_computed_tokens + len(query)
    kernels = params.kernels
    assert kernels is not None
    if not starts_at_zero(params.method):
        kernels.start(dense, prompt.dense_blocks, new, end, state, params)
    if prompt.attends:
        kernels.attend_observed(
            query, dense, prompt.dense_blocks, plan.num_computed_tokens,
            first_scoring - plan.num_computed_tokens, state, params, output,
        )  # fmt: skip
    elif plan.num_scoring:
        query = query[-plan.num_scoring :]
        kernels.observe(query, dense, prompt.dense_blocks, first_scoring, state, params)
    if prompt.resident_pages is None:
        partial[layer_name] = state
        return
    _collect(prompt, ScoredLayer(pages, state, params, dense), config)


def _collect(prompt: ObservedPrompt, layer: ScoredLayer, config: H2OConfig) -> None:
    prompt.layers.append(layer)
    compress = functools.partial(compress_prompt, prompt, config)
    prompt.transitions.collect(prompt, compress)


def _compress_by_gate(
    dense: Pages,
    pages: Pages,
    prompt: ObservedPrompt,
    config: H2OConfig,
    params: DecodeParams,
) -> None:
    """The transition of a prompt that no query has scored."""
    shape, device = (pages.keys.shape[1], prompt.plan.chunk_end), pages.keys.device
    state = {name: torch.zeros(shape, device=device) for name in pages.state}
    _collect(prompt, ScoredLayer(pages, state, params, dense), config)


def compress_prompt(prompt: ObservedPrompt, config: H2OConfig) -> None:
    """Copy each KV head's choice from the dense into the resident pages.

    Args:
        prompt: The row in its transition step, with the layers that are due.
        config: The policy.
    """
    assert prompt.resident_pages is not None
    first_query, kernels = prompt.plan.first_query, prompt.layers[0].params.kernels
    assert kernels is not None
    if config.gated:
        kernels.score_by_gate(prompt.layers, prompt.dense_blocks, first_query)
    kernels.transition(
        prompt.layers,
        prompt.dense_blocks,
        prompt.resident_pages,
        prompt.place(prompt.layers),
        first_query,
        config,
    )
    prompt.layers.clear()
