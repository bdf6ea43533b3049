"""The worker on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_h2o.attention.ops import cpu
from vllm_h2o.plugin.worker import H2OWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class H2OCPUWorker(H2OWorker, CPUWorker):
    """vLLM's CPU worker with H2O's attention backend."""

    overridden = AttentionBackendEnum.CPU_ATTN

    @staticmethod
    def choose_backend(vllm_config: VllmConfig) -> str:
        """See the base class; compiles the kernels, once per machine."""
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        cpu.build(dtype)
        return "vllm_h2o.attention.cpu_backend.H2OCPUBackend"
