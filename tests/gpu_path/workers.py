"""CUDA's attention backend and kernels inside a CPU engine, interpreted."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_h2o.attention import ops
from vllm_h2o.attention.ops import triton
from vllm_h2o.plugin.worker import H2OCPUWorker


class InterpretedWorker(H2OCPUWorker):
    """vLLM's CPU worker and V1 runner, with all that CUDA's path has beside them."""

    @staticmethod
    def register_backend(vllm_config: Any) -> None:
        """The platform names its backend itself: take that name."""
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_h2o.attention.cuda_backend.H2OTritonAttentionBackend",
        )
        # Kernels are chosen by the tensors' device, which is the CPU here.
        ops._kernel = lambda tensor, without_cuda="": triton
