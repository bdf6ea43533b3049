"""States for the text that a pass of `vllm_h2o.calibration.loaded_model` reads.

Layers of Mamba, a gated delta net or short convolution keep a state in blocks of the KV
cache, which is not there yet, and without metadata they take a pass for one whose
answers do not matter. They get blocks of a pass's own, and vLLM's metadata of one
prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_BLOCK = 1
"""The only one of a pass: vLLM's null block comes before it."""


@contextmanager
def states(
    vllm_config: VllmConfig, num_tokens: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Give the layers that keep a state a cache for one text.

    Args:
        vllm_config: The engine's, and the current one.
        num_tokens: Of the text.
        device: The model's.

    Yields:
        Metadata of the text for each of these layers, by name.
    """
    layers = {
        name: layer
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if isinstance(layer, MambaBase)
    }
    # Some have none yet.
    own = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    prepared: dict[KVCacheSpec, tuple[torch.Tensor, Any]] = {}
    metadata = {}
    try:
        for name, layer in layers.items():
            spec = layer.get_kv_cache_spec(vllm_config)
            assert spec is not None
            if spec not in prepared:
                # One for all layers: when the next one runs, a state is not read again.
                size = (_BLOCK + 1, 1, 1, spec.page_size_bytes)
                blocks = torch.zeros(size, dtype=torch.int8, device=device)
                builder = layer.get_attn_backend().get_builder_cls()
                common = _prompt(num_tokens, spec.block_size, device)
                built = builder(spec, [name], vllm_config, device).build(0, common)
                prepared[spec] = blocks, built
            blocks, metadata[name] = prepared[spec]
            layer.bind_kv_cache(blocks)
        yield metadata
    finally:
        for name, cache in own.items():
            if cache is None:
                del layers[name].kv_cache
            else:
                layers[name].kv_cache = cache


def _prompt(
    num_tokens: int, block_size: int, device: torch.device
) -> CommonAttentionMetadata:
    """A batch of one prompt, all of whose blocks are the same one."""
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    length = torch.tensor([num_tokens], dtype=torch.int32)
    columns = cdiv(num_tokens, block_size)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=length.to(device),
        num_reqs=1,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        block_table_tensor=torch.full(
            (1, columns), _BLOCK, dtype=torch.int32, device=device
        ),
        slot_mapping=torch.arange(num_tokens, device=device) + _BLOCK * block_size,
        is_prefilling=torch.ones(1, dtype=torch.bool),
        seq_lens_cpu_upper_bound=length,
    )
