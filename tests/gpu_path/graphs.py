"""Full CUDA graphs of model runner V2, acted out on the CPU.

A graph is the model run with the tensors of its capture: what a step changes must be
written into them. So a "replay" here runs the model eagerly, but with the attention
metadata and the input buffers of the capture; metadata that was built for the step
itself is dropped, as a real replay drops it. Rows are padded as vLLM pads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

PADDED_TO = 3
"""Rows of a graph are a multiple of this."""


class ActedGraphs:
    """Stands for the runner's `cudagraph_manager` in FULL mode."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.stock = runner, runner.cudagraph_manager
        self.captured: dict[int, dict[str, Any]] = {}
        self.replays = 0
        self.padded_replays = 0
        self.replays_with_dense = 0
        """Of which a row stays dense, beside pages of another kind."""
        dispatch = v2.dispatch_cg_and_sync_dp

        def dispatch_full(manager: Any, num_reqs: int, num_toks: int, uniform, *a, **k):
            size = runner.decode_query_len
            if uniform != size or k.get("need_eager"):
                return dispatch(self.stock, num_reqs, num_toks, uniform, *a, **k)
            rows = -(-num_reqs // PADDED_TO) * PADDED_TO
            assert rows <= runner.max_num_reqs
            self.real_rows = num_reqs
            self.padded_replays += rows > num_reqs
            if rows not in self.captured:
                self.capture(rows)
            mode = CUDAGraphMode.FULL
            return BatchExecutionDescriptor(mode, rows * size, rows, size), None

        v2.dispatch_cg_and_sync_dp = dispatch_full

    def capture(self, rows: int) -> None:
        """Prepare the tensors of a graph, as `prepare_inputs_to_capture` does."""
        runner = self.runner
        plan, runner.h2o_step._plan = runner.h2o_step._plan, None
        tokens = rows * runner.decode_query_len
        batch = InputBatch.make_dummy(rows, tokens, runner.input_buffers)
        tables, slots = runner.prepare_dummy_attn(batch)
        metadata = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.FULL, tables, slots, runner.attn_groups,
            runner.kv_cache_config, for_capture=True,
        )  # fmt: skip
        runner.h2o_step._plan = plan
        for part in _ours(metadata):
            for mine in _rows_of(part):
                assert (mine.positions == -1).all()
        self.captured[rows] = {
            # The objects a graph holds, whatever the steps build later.
            "metadata": {n: dataclasses.replace(m) for n, m in metadata.items()},
            "slots": build_slot_mappings_by_layer(slots, runner.kv_cache_config),
        }

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        """Replay."""
        self.replays += 1
        runner, rows, tokens = self.runner, desc.num_reqs, desc.num_tokens
        for part in _ours(self.captured[rows]["metadata"]):
            taken = [mine.positions >= 0 for mine in _rows_of(part)]
            calls = torch.stack(taken).sum(dim=0)
            assert (calls[: self.real_rows] == 1).all()
            assert (calls[self.real_rows :] == 0).all()
        self.replays_with_dense += len(taken) > 1 and bool(taken[1].any())
        with set_forward_context(
            self.captured[rows]["metadata"], runner.vllm_config, num_tokens=tokens,
            batch_descriptor=BatchDescriptor(tokens),
            slot_mapping=self.captured[rows]["slots"],
        ):  # fmt: skip
            return runner.model(
                input_ids=runner.input_buffers.input_ids[:tokens],
                positions=runner.input_buffers.positions[:tokens],
            )


def _rows_of(part: Any) -> list[Any]:
    """Resident rows, and those that stay dense where these are apart."""
    return [part.resident] if part.dense is None else [part.resident, part.dense]


def _ours(metadata: dict[str, Any]) -> list[Any]:
    """Of layers that are compressed: others have no resident rows."""
    return [part for part in metadata.values() if hasattr(part, "resident")]
