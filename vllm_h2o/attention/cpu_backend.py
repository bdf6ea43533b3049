"""The attention backend on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)

from vllm_h2o.attention.backend import H2OBackend, H2OImpl
from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.ops import cpu, named_kernels
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.methods import fused_prompt_form_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

logger = init_logger(f"vllm.{__name__}")


class H2OCPUImpl(H2OImpl, CPUAttentionBackendImpl):
    """Stock CPU attention for what our kernels do not attend to."""

    def view(self, kv_cache: torch.Tensor) -> Pages:
        """See the base class."""
        return Pages.view(kv_cache, *self._of_slots)

    def view_dense(self, kv_cache: torch.Tensor) -> Pages:
        """See the base class."""
        return Pages.view_dense(kv_cache)

    def view_cut(self, kv_cache: torch.Tensor, page_slots: int, cut: BlockCut) -> Pages:
        """See the base class."""
        options = (*self._of_slots, self.h2o.quantizes)
        return Pages.view_cut(kv_cache, page_slots, cut, *options)

    @property
    def _of_slots(self) -> tuple[Sequence[str], bool, bool]:
        """What pages have room for beside keys, values and births."""
        return self.h2o.method.fields, self.h2o.merges, self.h2o.reads_part


class H2OCPUBuilder(H2OMetadataBuilder, CPUAttentionMetadataBuilder):
    """Asks for a layout of the cache that our kernel reads."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not self.compresses:
            return
        fused = fused_prompt_form_of(self.spec.h2o.method) is not None
        # In 16 bits our kernel would round otherwise than stock's, and an answer would
        # depend on how its prompt was cut into steps.
        is_float32 = self.spec.dtype == torch.float32
        self.attends_observed = fused and is_float32 and named_kernels() is None
        if self.isa == "amx":
            # AMX packs keys in tiles, which the transition could not gather.
            logger.info_once("H2O uses the vec layout of the KV cache instead of amx")
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


def check_layer(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Raise ValueError for what our kernels do not have, and where vLLM lays the cache
    out as they can not read it."""
    if not CPUAttentionBackend.supports_block_size(block_size):
        raise ValueError(
            f"--block-size is {block_size}: vLLM's attention on CPU takes multiples of "
            "32; use --block-size 32"
        )
    if named_kernels() is None:
        cpu.check_supported(dtype, head_size, block_size)
    isa = _get_attn_isa(dtype, block_size, head_size)
    if isa not in ("vec", "vec16", "amx"):  # amx: the builder asks for vec
        raise ValueError(
            f"H2O on CPU reads the KV cache layouts vec and vec16, not {isa!r} of this "
            "processor: use x86-64, or drop --kv-policy (kv_policy, enable_h2o)"
        )


class H2OCPUBackend(H2OBackend, CPUAttentionBackend):
    """Keeps the name CPU_ATTN: vLLM looks names up in its own enum."""

    # In pages of 32 slots the kernel reads a tenth less in a second, in larger ones no
    # more.
    most_page_slots = 64

    @staticmethod
    def get_impl_cls() -> type[H2OCPUImpl]:
        """See the base class."""
        return H2OCPUImpl

    @staticmethod
    def get_builder_cls() -> type[H2OCPUBuilder]:
        """See the base class."""
        return H2OCPUBuilder

    @classmethod
    def check_supported(cls, spec: FullAttentionSpec, vllm_config: VllmConfig) -> None:
        """See the base class."""
        check_layer(spec.dtype, spec.head_size, spec.block_size)
