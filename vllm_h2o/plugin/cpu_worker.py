"""The worker on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_h2o.attention.ops import KERNELS, Capability, cpu, named_kernels
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.plugin.worker import H2OWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class H2OCPUWorker(H2OWorker, CPUWorker):
    """vLLM's CPU worker with H2O's attention backend."""

    overridden = AttentionBackendEnum.CPU_ATTN

    @staticmethod
    def choose_backend(vllm_config: VllmConfig) -> str:
        """See the base class; compiles the kernels, once per machine."""
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        named = named_kernels()
        if named is None:
            config = h2o_config(vllm_config)
            assert config is not None, "only H2O's worker calls this"
            cpu.build(dtype, config.quantizes)
        elif Capability.TORCH in named.CAPABILITIES:
            logger.warning_once(
                "H2O runs in plain torch, many times slower than its kernels: "
                "unset %s unless you are trying out a method", KERNELS,
            )  # fmt: skip
        return "vllm_h2o.attention.cpu_backend.H2OCPUBackend"
