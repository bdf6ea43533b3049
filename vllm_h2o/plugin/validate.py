"""What H2O refuses, with the option, its value and the fix; before weights load."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

import torch
from vllm import envs
from vllm.config.cache import CacheDType
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_h2o.core.settings import (
    CONFIG_KEY,
    h2o_config,
    layout_of,
    most_seconds,
    uses_profile_cache,
)
from vllm_h2o.plugin.connectors import check_connector
from vllm_h2o.plugin.engine_args import (
    SCHEDULER_CLS,
    WORKER_CLS,
    check_version,
    needed_worker_cls,
)
from vllm_h2o.plugin.keep_folder import check_keep_folder
from vllm_h2o.plugin.refusing import has_several_kinds, layer_kinds, refuse
from vllm_h2o.policy import rules
from vllm_h2o.policy.methods import fused_form_of
from vllm_h2o.policy.options import (
    ATTENTION,
    GATE,
    MEASURE,
    NONE,
    REQUEST,
    TEXT,
    shown,
)
from vllm_h2o.policy.profile import HeadProfile
from vllm_h2o.policy.reach import Reach

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_h2o.attention.ops import Kernels
    from vllm_h2o.policy.config import H2OConfig

_WINDOWED = {"sliding_attention", "chunked_attention"}
_DRAFTS_OF_TEXT = "ngram", "suffix", "custom_class"
"""Methods of vLLM's that draft on the host, without layers of their own."""


def check_vllm_config(vllm_config: VllmConfig) -> None:
    """Raise ValueError when H2O is on beside something it can not serve."""
    config = h2o_config(vllm_config)
    if config is None:
        _check_no_class_of_ours(vllm_config)
        return
    check_version()
    uses_profile_cache()
    most_seconds()
    _check_classes(vllm_config)
    _drop_idle_window(vllm_config)
    _check_model(vllm_config)
    _check_speculation(vllm_config, config)
    _check_reading_on(vllm_config, config)
    _check_parallel(vllm_config)
    check_connector(vllm_config, config)
    _check_cache(vllm_config)
    _check_kernel(vllm_config, config)
    budget = layout_of(vllm_config, config).budget
    Reach.of_config(config, budget, vllm_config.cache_config.block_size)
    _check_head_budgets(vllm_config, config)
    check_keep_folder(vllm_config, config)


def _given_classes(vllm_config: VllmConfig) -> dict[str, Any]:
    return {
        "scheduler_cls": vllm_config.scheduler_config.scheduler_cls,
        "worker_cls": vllm_config.parallel_config.worker_cls,
    }


def _check_no_class_of_ours(vllm_config: VllmConfig) -> None:
    ours = {SCHEDULER_CLS, *WORKER_CLS.values()}
    for option, given in _given_classes(vllm_config).items():
        if isinstance(given, str) and given in ours:
            raise ValueError(
                f"{option}={shown(given)} (--{option.replace('_', '-')}) is H2O's, but "
                "no policy is given: add --kv-policy h2o (kv_policy='h2o'), or drop it"
            )


def _check_classes(vllm_config: VllmConfig) -> None:
    """Settings alone change nothing: both classes must be there to read them."""
    needed = {"scheduler_cls": SCHEDULER_CLS, "worker_cls": needed_worker_cls()}
    for option, given in _given_classes(vllm_config).items():
        if not _is_subclass(given, needed[option]):
            raise ValueError(
                f"additional_config['{CONFIG_KEY}'] is given, but "
                f"{option}={shown(given)} (--{option.replace('_', '-')}) evicts "
                "nothing: use --kv-policy (kv_policy), or add "
                f"{option}={needed[option]!r}"
            )


def _is_subclass(given: Any, ours: str) -> bool:
    if given is None or given == ours:
        return given == ours
    cls = resolve_obj_by_qualname(given) if isinstance(given, str) else given
    return issubclass(cls, resolve_obj_by_qualname(ours))


def _drop_idle_window(vllm_config: VllmConfig) -> None:
    """Let layers attend fully whose window is no shorter than any request.

    Phi-3.5 and Phi-4-mini have one of 262144 tokens, and vLLM gives their layers a
    cache of windows, in which there would be nothing to compress. Of a hybrid's layers
    vLLM asks each.
    """
    cache, longest = vllm_config.cache_config, vllm_config.model_config.max_model_len
    if cache.sliding_window is not None and cache.sliding_window >= longest:
        cache.sliding_window = None


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if model.is_attention_free or layer_kinds(vllm_config) <= _WINDOWED:
        fix = "use a model with full-attention layers, there is nothing to compress"
        refuse("attention-free or sliding-window model", model.model, fix)
    window = vllm_config.cache_config.sliding_window
    if window is not None:
        fix = f"use --max-model-len {window} or less, within which no window binds"
        refuse("a model whose layers all have a window", window, fix)
    if model.is_diffusion:
        refuse("diffusion model", model.model, "use an autoregressive model")
    if model.use_mla:
        refuse("MLA model", model.model, "use a model without MLA")
    if model.is_encoder_decoder:
        refuse("encoder-decoder model", model.model, "use a decoder-only model")
    if model.runner_type != "generate":
        refuse("--runner", model.runner_type, "use --runner generate")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and (
        has_several_kinds(vllm_config)
    ):
        fix = "drop it: this model has layers with a window or a state of their own"
        refuse("--disable-hybrid-kv-cache-manager", True, fix)


def _check_speculation(vllm_config: VllmConfig, config: H2OConfig) -> None:
    if (speculative := vllm_config.speculative_config) is None:
        return
    option, method = "--speculative-config", speculative.method
    model = vllm_config.model_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    whole_blocks = config.eviction_unit == "block"
    overlaps = vllm_config.scheduler_config.async_scheduling
    asked = (
        # Layers of a drafter have a cache that H2O does not lay out.
        (method not in _DRAFTS_OF_TEXT, "method", method, f"use {_DRAFTS_OF_TEXT[0]}"),
        # What went into other values can not be taken out of them again.
        (config.merges, "--h2o-merge", config.merge, f"use {NONE!r}"),
        (config.reads_part, "--h2o-read", config.read, "use 100%"),
        (whole_blocks, "--h2o-eviction-unit", config.eviction_unit, "use 'token'"),
        # What a method keeps beside attention is noted nowhere.
        (fused_form_of(config.method) is None, "--h2o-score", config.score, "use sum"),
        # Only the last stage learns what was refused.
        # Slots are laid out anew at counts that only the device would know.
        (overlaps, "--async-scheduling", True, "use --no-async-scheduling"),
        (stages > 1, "--pipeline-parallel-size", stages, "use 1"),
        (model.is_hybrid, "a model with states", model.model, "use another model"),
    )
    for holds, beside, value, fix in asked:
        if holds:
            refuse(f"{option} with {beside}", value, f"{fix}, or drop {option}")


def _check_reading_on(vllm_config: VllmConfig, config: H2OConfig) -> None:
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if config.moves_keys and stages > 1:
        # How keys are rotated is seen in a pass of the whole model.
        fix = f"use --h2o-positions {TEXT}, or no pipeline"
        refuse("--h2o-positions with --pipeline-parallel-size", stages, fix)
    scored = config.prompt_score == ATTENTION and config.keeps_heavy_set
    asked = (
        # A chunk's end may lie within an image, whose tokens see each other.
        (config.prefill_chunk, "--h2o-prefill-chunk", config.prefill_chunk, "0"),
        (config.keeps, "--h2o-keep", config.keep, shown(NONE)),
        # A query of the window is scored, and in float32 attends, as if it saw none of
        # the tokens behind it. What `auto` comes to the worker knows.
        (scored, "--h2o-prompt-score", config.prompt_score, shown(GATE)),
    )
    for holds, option, value, use in asked:
        if holds and vllm_config.model_config.is_mm_prefix_lm:
            why = "this model reads images in both directions"
            refuse(option, value, f"{why}: use {use}, --language-model-only")
    if not config.keeps:
        return
    why = ""
    if not vllm_config.cache_config.enable_prefix_caching:
        why = "it needs --enable-prefix-caching"
    elif has_several_kinds(vllm_config):
        why = "this model has layers with a window or a state of their own"
    if why:
        refuse("--h2o-keep", config.keep, f"{why}: use {NONE!r}")


def _check_parallel(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        size = parallel.decode_context_parallel_size
        refuse("--decode-context-parallel-size", size, "use 1")
    if parallel.prefill_context_parallel_size > 1:
        size = parallel.prefill_context_parallel_size
        refuse("--prefill-context-parallel-size", size, "use 1")
    stages = parallel.pipeline_parallel_size
    if stages > 1 and not vllm_config.scheduler_config.async_scheduling:
        # H2O's scheduler is vLLM's asynchronous one, which then schedules tokens
        # that the first stage does not get.
        fix = "use --async-scheduling where vLLM has it, or --pipeline-parallel-size 1"
        refuse("--pipeline-parallel-size without --async-scheduling", stages, fix)
    if vllm_config.aux_output_config.enabled:
        # Kept per block that is published, which a compressed request does not do.
        option = "--enable-return-routed-experts (--aux-output-config)"
        refuse(option, True, "drop --enable-return-routed-experts")


def _check_cache(vllm_config: VllmConfig) -> None:
    model, dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    own = str(model.dtype).removeprefix("torch.")
    has_name = own in get_args(CacheDType)
    quantization = getattr(model.hf_config, "quantization_config", None)
    scheme = isinstance(quantization, dict) and quantization.get("kv_cache_scheme")
    if scheme and dtype == "auto":
        # The layers would follow their checkpoint.
        named = own if has_name else "bfloat16"
        also = "" if has_name else "--dtype bfloat16 "
        fix = f"use {also}--kv-cache-dtype {named}"
        refuse("the quantized KV cache of this checkpoint", model.model, fix)
    # The kernels read queries, keys and values as one type.
    if is_quantized_kv_cache(dtype) or (
        kv_cache_dtype_str_to_dtype(dtype, model) != model.dtype
    ):
        # Not auto where there is a name: that may be what the checkpoint made of it.
        named = own if has_name else "auto"
        refuse("--kv-cache-dtype", dtype, f"use --kv-cache-dtype {named}")


def _check_kernel(vllm_config: VllmConfig, config: H2OConfig) -> None:
    """What the kernel lacks, as far as the model's config tells."""
    from vllm.platforms import current_platform

    from vllm_h2o.attention.ops import KERNELS, named_kernels

    model = vllm_config.model_config
    assert isinstance(model.dtype, torch.dtype)
    block_size = vllm_config.cache_config.block_size
    shape = (model.dtype, model.get_head_size(), block_size)
    named = named_kernels()
    where = f"{KERNELS}={os.environ[KERNELS]}" if named else ""
    if current_platform.is_cpu():
        from vllm_h2o.attention.cpu_backend import check_layer
        from vllm_h2o.attention.ops import cpu

        check_layer(*shape)
        check_kernels(config, named or cpu, where or "CPU")
        _check_drafts(vllm_config, named or cpu, where or "CPU")
        return
    from vllm_h2o.attention.ops import triton

    check_kernels(config, named or triton, where or "CUDA")
    _check_drafts(vllm_config, named or triton, where or "CUDA")
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    kv_heads = model.get_num_kv_heads(vllm_config.parallel_config)
    triton.check_supported(*shape, heads, kv_heads)
    check_cuda_options(vllm_config)


def check_kernels(config: H2OConfig, kernels: Kernels, platform: str) -> None:
    """Raise ValueError where the platform's kernels lack what a policy needs.

    Args:
        config: The policy.
        kernels: The platform's.
        platform: Where they run, or what chose them.
    """
    lacking = (
        f"has no kernel on {platform}: set VLLM_H2O_KERNELS=reference, which runs all "
        "in plain torch, slowly and on CPU only"
    )
    rules.check_kernels(config, kernels.FORMS, kernels.CAPABILITIES, lacking)


def _check_drafts(vllm_config: VllmConfig, kernels: Kernels, platform: str) -> None:
    speculative = vllm_config.speculative_config
    if speculative is not None and rules.Capability.DRAFTS not in kernels.CAPABILITIES:
        fix = f"it has no kernel on {platform}: drop --speculative-config"
        refuse("--speculative-config", speculative.method, fix)


def check_cuda_options(vllm_config: VllmConfig) -> None:
    """Raise ValueError for options of vLLM on CUDA that H2O can not serve."""
    from vllm_h2o.attention.ops import KERNELS, REFERENCE

    if os.environ.get(KERNELS) == REFERENCE:
        # It reads positions on the host: every step would wait for the device.
        refuse(f"{KERNELS} on CUDA", REFERENCE, f"unset {KERNELS}, or use a CPU")
    attention = vllm_config.attention_config
    backend = attention.backend.name if attention.backend else None
    # CUSTOM: H2O's own, in a worker that shares the config of its engine.
    if backend not in (None, "FLASH_ATTN", "TRITON_ATTN", "CUSTOM"):
        fix = "use FLASH_ATTN or TRITON_ATTN, which read the prompts"
        refuse("--attention-backend", backend, fix)
    if attention.backend_per_kind:
        fix = "use --attention-backend"
        refuse("attention_config.backend_per_kind", attention.backend_per_kind, fix)
    layout = envs.VLLM_KV_CACHE_LAYOUT or ""
    config = h2o_config(vllm_config)
    if layout.startswith("B") and has_several_kinds(vllm_config):
        # vLLM then packs layers of one kind into a spec that is no longer ours.
        fix = "unset it, this model has layers of several kinds"
        refuse("VLLM_KV_CACHE_LAYOUT", layout, fix)
    if layout.startswith("B") and config is not None and config.keeps:
        # Blocks of a layer then lie apart, and are copied as if they did not.
        fix = f"unset it, or use --h2o-keep {NONE}"
        refuse("VLLM_KV_CACHE_LAYOUT", layout, fix)
    parallel = vllm_config.parallel_config
    if parallel.enable_dbo:
        refuse("--enable-dbo", True, "drop --enable-dbo")
    if parallel.use_ubatching:  # two batches at once would share a decode's scratch
        refuse("--ubatch-size", parallel.ubatch_size, "drop --ubatch-size")
    if envs.VLLM_BATCH_INVARIANT:
        # Splits, and so the order of sums, depend on the number of rows.
        refuse("VLLM_BATCH_INVARIANT", 1, "unset it")


def _check_head_budgets(vllm_config: VllmConfig, config: H2OConfig) -> None:
    from vllm_h2o.calibration.head_profiles import check_profile, profile_path

    path = profile_path(config, vllm_config.model_config.model)
    if path is None and config.head_budgets not in (MEASURE, REQUEST):
        return
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        fix = "use --h2o-head-budgets uniform, or no pipeline"
        refuse("--h2o-head-budgets with --pipeline-parallel-size", stages, fix)
    if path is None:
        if config.head_budgets == MEASURE:
            _check_text_length(vllm_config)
        return
    profile = HeadProfile.load(path)
    if vllm_config.model_config.is_hybrid:
        return  # Configs name layers in many ways; the worker counts those that evict.
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None)
    if kinds is None:
        kinds = [
            "full_attention"
        ] * vllm_config.model_config.get_total_num_hidden_layers()
    check_profile(profile, path, vllm_config, list(kinds).count("full_attention"))


def _check_text_length(vllm_config: VllmConfig) -> None:
    """Raise ValueError when the texts that measure the heads would be too short."""
    from vllm_h2o.calibration.loaded_model import FEWEST_TOKENS, longest_step

    option, length = longest_step(vllm_config)
    if length < FEWEST_TOKENS:
        fix = f"use at least {FEWEST_TOKENS}, or --h2o-head-budgets uniform"
        refuse(f"--h2o-head-budgets measure with {option}", length, fix)


def check_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Raise when a layer that H2O should compress would silently not be.

    vLLM merges the specs of the layers into groups after it asked for them.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    from vllm_h2o.core.spec import H2OAttentionSpec

    layers = get_layers_from_vllm_config(vllm_config, Attention)
    spec_of = {
        name: group.kv_cache_spec
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    for name, layer in layers.items():
        spec = spec_of.get(name)
        if (
            spec is None
            or layer.sliding_window is not None
            or isinstance(spec, ChunkedLocalAttentionSpec)
        ):
            continue
        if type(spec) is not H2OAttentionSpec:
            why = "a kind of attention that H2O does not have"
            if isinstance(spec, UniformTypeKVCacheSpecs):
                why = "because its layers differ in shape"
            raise ValueError(
                f"H2O can not compress layer {name}: vLLM gave it "
                f"{type(spec).__name__}, {why}; "
                "drop --kv-policy (kv_policy, enable_h2o)"
            )


def check_kernel_block_size(managed: KVCacheSpec, read: KVCacheSpec) -> None:
    """Raise when the stock backend reads smaller blocks than are managed.

    vLLM then cuts each page in several, which leaves no place for the state of slots.
    """
    if managed.block_size != read.block_size:
        raise ValueError(
            f"H2O needs one page per block, but --block-size {managed.block_size} is "
            f"cut into blocks of {read.block_size} for the attention backend: use "
            f"--block-size {read.block_size}, or where vLLM sizes blocks by a model's "
            "states --attention-backend TRITON_ATTN, or drop --kv-policy"
        )
