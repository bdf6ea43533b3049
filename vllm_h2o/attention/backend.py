"""The attention backend on CPU: stock for prompts, ours for resident rows."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_h2o.attention.heads import LayerHeads
from vllm_h2o.attention.metadata import H2OMetadata, H2OMetadataBuilder
from vllm_h2o.attention.ops import DecodeParams, cpu, decode_resident
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.prompt import observe_prompt, part_ways
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec


class H2OAttentionBackend(CPUAttentionBackend):
    """Keeps the name CPU_ATTN: vLLM looks names up in its own enum."""

    @staticmethod
    def get_impl_cls() -> type[H2OAttentionImpl]:
        return H2OAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[H2OMetadataBuilder]:
        return H2OMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Turn the spec of a full-attention layer into H2O's."""
        if type(spec) is not FullAttentionSpec:
            return spec
        vllm_config = get_current_vllm_config()
        config = h2o_config(vllm_config)
        if config is None:
            # Registered for an earlier engine of this process.
            return spec
        cpu.check_supported(spec.dtype, spec.head_size, spec.block_size)
        max_model_len = vllm_config.model_config.max_model_len
        return H2OAttentionSpec.of(spec, config, max_model_len)


class H2OAttentionImpl(CPUAttentionBackendImpl):
    """One layer. Layers that are not full decoder attention run stock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = h2o_config(get_current_vllm_config())
        if (
            config is None
            or self.attn_type != AttentionType.DECODER
            or self.sliding_window > 0
        ):
            return
        _refuse_layer(self)
        self.h2o = config
        self.heads: LayerHeads | None = None
        self._cache_address = 0

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; see the base class for shapes.

        Prompt rows run first, on dense blocks that stock vLLM has just written.
        Resident rows touch nothing but resident blocks.
        """
        metadata = attn_metadata
        if not isinstance(metadata, H2OMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        self._bind(kv_cache, metadata)
        if metadata.stock is not None:
            self._forward_prompts(layer, query, key, value, kv_cache, metadata, output)
        if metadata.resident is not None:
            self._part_ways(metadata)
            self._forward_residents(query, key, value, metadata, output)
        return output

    def _bind(self, kv_cache: torch.Tensor, metadata: H2OMetadata) -> None:
        """View the pages once: vLLM binds the cache after the impl is made."""
        if kv_cache.data_ptr() == self._cache_address:
            return
        self._pages = Pages.view(kv_cache)
        self._params = DecodeParams(
            layout=metadata.layout,
            scale=self.scale,
            softcap=float(self.logits_soft_cap),
            score_decay=self.h2o.score_decay,
            mean=self.h2o.score == "mean",
            heads=self.heads.slots() if self.heads else None,
        )
        self._cache_address = kv_cache.data_ptr()

    def _part_ways(self, metadata: H2OMetadata) -> None:
        """Give heads their own slots in rows that have just filled the budget.

        The first layer does it for all: a page that a layer borrows must not be
        written while its lender still has tokens there.
        """
        if self.heads is None or not metadata.filled:
            return
        assert metadata.resident is not None
        for layer in self.heads.members:
            impl = layer.impl
            impl._bind(layer.kv_cache, metadata)
            for row in metadata.filled:
                blocks = metadata.resident.block_table[row]
                first_query = int(metadata.resident.first_queries[row])
                part_ways(impl._pages, blocks, first_query, impl.h2o, impl._params)
        metadata.filled = []

    def _forward_prompts(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: H2OMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens = metadata.stock_tokens
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, metadata.stock, output)
        else:
            part = torch.empty_like(output[: len(tokens)])
            super().forward(
                layer, query[tokens], key, value, kv_cache, metadata.stock, part
            )
            output[tokens] = part
        for prompt in metadata.observed:
            observe_prompt(
                query[prompt.tokens],
                self._pages,
                prompt,
                layer.layer_name,
                self.h2o,
                self._params,
            )

    def _forward_residents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: H2OMetadata,
        output: torch.Tensor,
    ) -> None:
        assert metadata.resident is not None
        tokens = metadata.resident_tokens
        if tokens is None:
            rows = slice(0, metadata.num_actual_tokens)
            query, key, value = query[rows], key[rows], value[rows]
            part = output[rows]
        else:
            query, key, value = query[tokens], key[tokens], value[tokens]
            part = torch.empty_like(output[: len(tokens)])
        decode_resident(
            query, key, value, self._pages, metadata.resident, self._params, part
        )
        if tokens is not None:
            output[tokens] = part


def _refuse_layer(impl: H2OAttentionImpl) -> None:
    """Raise ValueError for attention that the resident kernels do not compute."""
    refused = {
        "ALiBi": impl.alibi_slopes is not None,
        "attention sinks in the softmax (gpt-oss)": impl.sinks is not None,
        "KV sharing between layers": impl.kv_sharing_target_layer_name is not None,
    }
    for feature, present in refused.items():
        if present:
            raise ValueError(
                f"H2O does not support {feature}, which this model uses: "
                "drop --kv-policy (kv_policy, enable_h2o)"
            )
