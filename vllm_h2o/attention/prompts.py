"""Prompts: scored or read beside what is held, and compressed where a chunk ends.

A prompt that is read whole is one chunk. The first chunk is read densely, by stock's
attention or ours; its queries, or the gate, score it. A later one is read beside what
is held of those before it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from vllm_h2o.attention.layer import BoundLayer
from vllm_h2o.attention.ops import SCRATCH_BYTES, Chunk, Held, ScoredLayer
from vllm_h2o.attention.placements import Budget
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.methods import State, starts_at_zero

PartialStates = dict[str, State]
"""Of a prompt whose observation window spans steps, by layer name."""


class Transitions:
    """What is due of an engine's requests, and what they need until then.

    Attributes:
        seconds: That transitions between steps have taken; for whoever takes them out.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self.seconds: list[float] = []
        self._due: dict[str, list[Callable[[], None]]] = {}
        self._begun: list[PromptRow] = []
        self._state_bytes = 0  # of layers that wait for their row's last
        self._partial: dict[str, PartialStates] = {}

    def partial_states(self, request_id: str) -> PartialStates:
        """State of earlier steps of a prompt; each layer takes its own out."""
        return self._partial.setdefault(request_id, {})

    def collect(self, row: PromptRow, config: H2OConfig) -> None:
        """Take in a layer of a chunk that has ended, and compress it when it is time.

        On CPU that is between this step and the next, all layers at once: the first
        token does not wait for it, and the heads of all layers share out the threads.
        On a GPU it is when the last layer has run, so that layers share launches; or
        earlier, when the states of what waits take `SCRATCH_BYTES`. What queries have
        scored of a first chunk is compressed layer by layer, unless layers share out
        the request's slots: then states that would take more wait in the host's memory.

        Args:
            row: The row, in its transition step, with the layer as its last.
            config: The policy.
        """
        if row.blocks.is_cpu:
            if len(row.layers) == 1:
                compress = functools.partial(row.compress, config)
                self._due.setdefault(row.request_id, []).append(compress)
            return
        if row.num_run == 1:
            self._begun.append(row)
        self._state_bytes += row.layers[-1].state_bytes
        splits = row.chunk is None and row.placements.splits_each_request
        waits = config.gated or row.chunk is not None or splits
        is_last, much = row.num_run == row.num_layers, self._state_bytes > SCRATCH_BYTES
        if splits and (much or row.is_put_aside):
            self._state_bytes -= row.put_aside()
        if is_last or not waits or (much and not splits):
            self._state_bytes -= row.state_bytes
            row.compress(config)

    def run(self) -> None:
        """Run what the last step put off.

        Freed blocks may have new owners, but these write only in the step that begins
        now.
        """
        assert all(row.num_run == row.num_layers for row in self._begun), (
            "a layer has not run"
        )
        self._begun.clear()
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

    def clear(self) -> None:
        """Forget all requests: the KV cache goes."""
        self._due.clear()
        self._begun.clear()
        self._state_bytes = 0
        self._partial.clear()


@dataclass(eq=False)
class PromptRow:
    """A row whose prompt scores, is read beside what is held, or is compressed.

    Attributes:
        request_id: The request.
        transitions: The engine's.
        placements: Of the rows' slots.
        tokens: The row's tokens in the batch.
        plan: The row's counts.
        num_layers: That the row passes through.
        blocks: `[cdiv(seq_len, block_size)]` int32 dense blocks, by position.
        resident: `[num_resident]` int32 pages of resident blocks, in the transition
            step of a first chunk.
        attends: Whether our kernel attends to a first chunk; else stock's has done so.
        chunk: A later chunk; None: the row is in its first.
        layers: Layers that have run and are to be compressed.
        num_run: Layers that have run, in the transition step.
        is_put_aside: Whether their states are in the host's memory.
    """

    request_id: str
    transitions: Transitions
    placements: RowPlacements
    tokens: slice
    plan: RowPlan
    num_layers: int
    blocks: torch.Tensor
    resident: torch.Tensor | None = None
    attends: bool = False
    chunk: Chunk | None = None
    layers: list[ScoredLayer] = field(default_factory=list)
    num_run: int = 0
    is_put_aside: bool = False

    @property
    def state_bytes(self) -> int:
        """Of the layers' states, on their device."""
        states = [layer.state for layer in self.layers]
        device = self.blocks.device
        return sum(
            x.nbytes for each in states for x in each.values() if x.device == device
        )

    def put_aside(self) -> int:
        """Move the layers' states to the host's memory, and wait for that.

        Layers that share out a request's slots wait for the last of them, in each
        request whose prompt ends in the step.

        Returns:
            Bytes that are free on the device.
        """
        num_bytes, self.is_put_aside = self.state_bytes, True
        self.layers = [_moved(layer, torch.device("cpu")) for layer in self.layers]
        return num_bytes

    def attend(
        self, name: str, layer: BoundLayer, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Do a layer's part of the step; where a chunk ends, its compression is due.

        Args:
            name: Of the layer, whose state of earlier steps this is.
            layer: The layer.
            query: `[num_tokens, num_heads, head_size]` of the row, after RoPE. Its
                keys and values are in the dense blocks already.
            output: `[num_tokens, num_heads, head_size]` attention of the row's queries,
                written if the stock kernel has not done so.
        """
        partial = self.transitions.partial_states(self.request_id)
        state = partial.pop(name, None)
        if self.chunk is not None:
            state = self._read_on(self.chunk, layer, state, query, output)
        elif layer.config.gated:
            assert layer.params.gate is not None, "the worker gives it before the cache"
            state = {}  # until it is compressed
        else:
            state = self._observe(layer, state, query, output)
        if not self.plan.is_transition:
            partial[name] = state
            return
        self.layers.append(ScoredLayer(layer.pages, state, layer.params, layer.dense))
        self.num_run += 1
        self.transitions.collect(self, layer.config)

    def _observe(
        self,
        layer: BoundLayer,
        state: State | None,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> State:
        """Score the prompt with this step's queries, if any."""
        plan, params = self.plan, layer.params
        new, end = plan.num_computed_tokens, plan.num_computed_tokens + len(query)
        first_scoring = max(new, plan.first_query)
        if state is None or first_scoring == plan.first_query:
            # The first step with observation queries, also after a restart.
            new = 0
            state = self._zeros(
                layer, (*layer.pages.state, *params.method.prompt_fields)
            )
        kernels = params.operations
        if not starts_at_zero(params.method):
            kernels.start(layer.dense, self.blocks, new, end, state, params)
        if self.attends:
            kernels.attend_observed(
                query, layer.dense, self.blocks, plan.num_computed_tokens,
                first_scoring - plan.num_computed_tokens, state, params, output,
            )  # fmt: skip
        elif plan.num_scoring:
            query = query[-plan.num_scoring :]
            kernels.observe(
                query, layer.dense, self.blocks, first_scoring, state, params
            )
        return state

    def _zeros(self, layer: BoundLayer, fields: Iterable[str]) -> State:
        """The state of a prompt that nobody has looked at."""
        keys = layer.pages.keys
        shape = keys.shape[1], self.plan.chunk_end
        return {name: torch.zeros(shape, device=keys.device) for name in fields}

    def _read_on(
        self,
        chunk: Chunk,
        layer: BoundLayer,
        state: State | None,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> State:
        """Attend beside what is held of earlier chunks."""
        computed = self.plan.num_computed_tokens
        if state is None or computed == chunk.start:
            state = {}
        layer.params.operations.read_on(
            query, computed, layer.dense, layer.pages, chunk, state, layer.params,
            output,
        )  # fmt: skip
        return state

    def compress(self, config: H2OConfig) -> None:
        """Let each KV head choose what it keeps, into its resident pages.

        Args:
            config: The policy.
        """
        plan, kernels = self.plan, self.layers[0].params.operations
        if self.chunk is not None:
            kernels.compress_chunk(self.layers, self.chunk, config)
            self.layers.clear()
            return
        assert self.resident is not None
        self.placements.split(self.request_id, plan, self.layers)
        for layers in self._parts(config):
            if self.is_put_aside:
                layers = [_moved(layer, self.blocks.device) for layer in layers]
            if config.gated:
                layers = self._expecting(layers)
                kernels.score_by_gate(layers, self.blocks, plan.first_query)
            filled = plan.chunk_end > plan.budget
            placement = self.placements.index(self.request_id, Budget.of(plan), filled)
            held = Held(self.resident, placement, plan.chunk_end)
            kernels.transition(layers, self.blocks, held, plan.first_query, config)
        self.layers.clear()

    def _parts(self, config: H2OConfig) -> Iterator[list[ScoredLayer]]:
        """Layers that are compressed at once: on a GPU those whose scores take little
        memory, on CPU all."""
        count, keys = len(self.layers), self.layers[0].pages.keys
        of_layer = 0
        if self.is_put_aside:
            of_layer = self.layers[0].state_bytes
        elif config.gated and not keys.is_cpu:
            of_layer = 4 * keys.shape[1] * self.plan.chunk_end
        if of_layer:
            count = max(1, SCRATCH_BYTES // of_layer)
            count = 2 ** (count.bit_length() - 1)  # few batches are ever made
        for first in range(0, len(self.layers), count):
            yield self.layers[first : first + count]

    def _expecting(self, layers: list[ScoredLayer]) -> list[ScoredLayer]:
        """The layers, with the state of a prompt that nobody has looked at."""
        keys, names = layers[0].pages.keys, list(layers[0].pages.state)
        shape = len(names), len(layers), keys.shape[1], self.plan.chunk_end
        zeros = torch.zeros(shape, device=keys.device)
        return [
            replace(layer, state=dict(zip(names, zeros[:, i], strict=True)))
            for i, layer in enumerate(layers)
        ]


def _moved(layer: ScoredLayer, device: torch.device) -> ScoredLayer:
    """The layer, with its state on a device."""
    state = {name: mine.to(device) for name, mine in layer.state.items()}
    return replace(layer, state=state)
