"""CUDA's attention backend and kernels inside a CPU engine, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.engine.known_drafts import KnownDrafts
from vllm_h2o.attention import ops
from vllm_h2o.attention.ops import triton
from vllm_h2o.plugin.cpu_worker import H2OCPUWorker


class NotedOps:
    """The Triton kernels' module, and which of its functions were asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(triton, name)


NOTED = NotedOps()


class InterpretedWorker(H2OCPUWorker):
    """vLLM's CPU worker, runner V1 or V2, with all that CUDA's path has beside them."""

    @staticmethod
    def choose_backend(vllm_config: Any) -> str:
        """CUDA's; under the name that the CPU platform gives to its own."""
        # Kernels are chosen by the tensors' device, which is the CPU here.
        ops.kernels_of = lambda device: NOTED
        return "vllm_h2o.attention.cuda_backend.H2OTritonAttentionBackend"

    def _resolve(self) -> None:
        """As on a GPU, whose tables are made once."""
        super()._resolve()
        self._resolved = replace(self._resolved, device="cuda")

    def init_device(self) -> None:
        """Note what runner V1 asks its dispatcher of CUDA graphs for."""
        super().init_device()
        self._one_token_steps: list[tuple[bool, bool]] = []
        if self.vllm_config.use_v2_model_runner:
            return
        dispatcher = self.model_runner.cudagraph_dispatcher
        dispatch = dispatcher.dispatch

        def noting(*args: Any, **kwargs: Any) -> Any:
            plan = self._step._plan
            if plan and kwargs["num_tokens"] == len(plan.rows):
                seen = (self._step.all_decode, kwargs["uniform_decode"])
                self._one_token_steps.append(seen)
            return dispatch(*args, **kwargs)

        dispatcher.dispatch = noting

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Draft on runner V2 what is known: the interpreter can not run vLLM's n-gram
        kernels, whose masks it refuses."""
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if self.vllm_config.use_v2_model_runner and runner.speculator is not None:
            known = KnownDrafts(self.vllm_config)

            def propose(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                return known.of_states(input_batch.idx_mapping, runner.req_states)

            runner.speculator.propose = propose

    def compile_or_warm_up_model(self) -> Any:
        """As CUDA's does, before vLLM watches for kernels that are compiled late."""
        times = super().compile_or_warm_up_model()
        self.warm_up_kernels()
        return times

    def probe_ops(self) -> list[str]:
        """What has been called so far."""
        return sorted(NOTED.names)

    def probe_one_token_steps(self) -> list[tuple[bool, bool]]:
        """Of steps of one token per row: whether all decode, and what was asked."""
        return self._one_token_steps


class GraphedWorker(InterpretedWorker):
    """With full graphs of decode steps, acted out; runner V2 only."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Put the graphs where the runner looks for them."""
        from tests.gpu_path.graphs import ActedGraphs

        super().initialize_from_config(kv_cache_config)
        self.model_runner.h2o_step = self._step
        self.graphs = ActedGraphs(self.model_runner)
        self.model_runner.cudagraph_manager = self.graphs

    def probe_graphs(self) -> tuple[int, int, int]:
        """Replays, how many had padding, and how many a row that stays dense."""
        graphs = self.graphs
        return graphs.replays, graphs.padded_replays, graphs.replays_with_dense
