"""What H2O refuses, with the option, its value and the fix; before weights load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.layout import SlotLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_OFF = "or drop --kv-policy (kv_policy, enable_h2o)"


def check_vllm_config(vllm_config: VllmConfig) -> None:
    """Raise ValueError when H2O is on beside something it can not serve."""
    config = h2o_config(vllm_config)
    if config is None:
        return
    _check_model(vllm_config)
    _check_parallel(vllm_config)
    _check_cache(vllm_config)
    SlotLayout.from_config(
        config,
        vllm_config.cache_config.block_size,
        vllm_config.model_config.max_model_len,
    )


def _refuse(option: str, value: Any, fix: str) -> None:
    raise ValueError(f"H2O does not support {option}={value!r}: {fix}, {_OFF}")


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if vllm_config.speculative_config is not None:
        method = vllm_config.speculative_config.method
        _refuse("--speculative-config", method, "drop --speculative-config")
    if model.use_mla:
        _refuse("MLA model", model.model, "use a model without MLA")
    if model.is_encoder_decoder:
        _refuse("encoder-decoder model", model.model, "use a decoder-only model")
    if model.runner_type != "generate":
        _refuse("--runner", model.runner_type, "use --runner generate")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and (
        _has_other_attention(vllm_config)
    ):
        _refuse(
            "--disable-hybrid-kv-cache-manager",
            True,
            "drop it: this model has sliding-window layers, which keep their own",
        )


def _has_other_attention(vllm_config: VllmConfig) -> bool:
    text = vllm_config.model_config.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) and "full_attention" in kinds


def _check_parallel(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        size = parallel.decode_context_parallel_size
        _refuse("--decode-context-parallel-size", size, "use 1")
    if parallel.prefill_context_parallel_size > 1:
        size = parallel.prefill_context_parallel_size
        _refuse("--prefill-context-parallel-size", size, "use 1")
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        _refuse("--kv-transfer-config", connector, "drop --kv-transfer-config")


def _check_cache(vllm_config: VllmConfig) -> None:
    from vllm.utils.torch_utils import is_quantized_kv_cache

    dtype = vllm_config.cache_config.cache_dtype
    if is_quantized_kv_cache(dtype):
        _refuse("--kv-cache-dtype", dtype, "use --kv-cache-dtype auto")


def check_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Raise when a layer that H2O should compress would silently not be.

    vLLM merges the specs of the layers into groups after it asked for them.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from vllm_h2o.core.spec import H2OAttentionSpec

    layers = get_layers_from_vllm_config(vllm_config, Attention)
    spec_of = {
        name: group.kv_cache_spec
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    for name, layer in layers.items():
        spec = spec_of.get(name)
        if spec is None or layer.sliding_window is not None:
            continue
        if type(spec) is not H2OAttentionSpec:
            raise ValueError(
                f"H2O can not compress layer {name}: vLLM gave it "
                f"{type(spec).__name__}, because its layers differ in shape; "
                "drop --kv-policy (kv_policy, enable_h2o)"
            )
