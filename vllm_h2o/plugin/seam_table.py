"""What `seams.py` expects of vLLM: by module and name the forms that H2O works with.

A form is a function's parameters (`=`: has a default), a class's bases, an attribute's
annotation; empty: assigned or imported without one; None: may be missing. Any of the
forms will do; the first is vLLM 0.32's, a second one 0.33's. Of a name that is added
with `()` the command prints the form. tests/plugin/test_seams.py finds what is imported
or overridden and not here; what is called or read is to be added by hand.
"""

# ruff: noqa: E501

SEAMS: dict[str, tuple[str | None, ...]] = {
    "v1.core.single_type_kv_cache_manager:FullAttentionManager": (
        "class (SingleTypeKVCacheManager)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__": (
        "(self, kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, scheduler_block_size, dcp_world_size=, pcp_world_size=, needs_kv_cache_zeroing=, max_admission_blocks_per_request=)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate": (
        "(self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=, prefill_end=)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks": (
        "(self, request_id, num_tokens, num_tokens_main_model)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks": (
        "(self, request_id, processed_computed_tokens, num_prompt_tokens=)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free": (
        "(self, request_id)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": (
        "(self, request, num_tokens, retention_interval=, *, replay_boundaries)",
    ),
    "v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit": (
        "(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens, dcp_world_size=, pcp_world_size=)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._remove_blocks_in_range": (
        "(self, request_id, first_block, last_block)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._get_num_evictable_blocks": (
        "(cls, blocks)",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.req_to_blocks": (
        "is defaultdict[str, list[KVCacheBlock]]",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.num_cached_block": (
        "is dict[str, int]",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.new_block_ids": (
        "is list[int]",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._record_new_block_ids": (
        "",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._null_block": ("",),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_size": ("",),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_pool": ("",),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.kv_cache_spec": (
        "",
    ),
    "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.supports_fine_grained_hash_lookup": (
        "is ClassVar[bool]",
    ),
    "v1.core.single_type_kv_cache_manager:FullAttentionManager.supports_fine_grained_hash_lookup": (
        "is ClassVar[bool]",
    ),
    "v1.core.block_pool:BlockPool.get_new_blocks": ("(self, num_blocks)",),
    "v1.core.block_pool:BlockPool.free_blocks": ("(self, ordered_blocks)",),
    "v1.core.block_pool:BlockPool.get_num_free_blocks": ("(self)",),
    "v1.core.block_pool:BlockPool.num_gpu_blocks": ("",),
    "v1.core.block_pool:BlockPool.null_block": ("",),
    "v1.core.block_pool:BlockPool.blocks": ("is list[KVCacheBlock]",),
    "v1.core.block_pool:BlockPool.free_block_queue": ("",),
    "v1.core.kv_cache_utils:KVCacheBlock.ref_cnt": ("is int",),
    "v1.core.kv_cache_utils:KVCacheBlock.block_id": ("is int",),
    "v1.core.kv_cache_utils:KVCacheBlock.block_hash": ("(self)",),
    "v1.core.kv_cache_utils:KVCacheBlock.is_null": ("is bool",),
    "v1.core.kv_cache_utils:KVCacheBlock.set_block_hash": (
        "(self, block_hash, num_tokens=)",
    ),
    "v1.core.kv_cache_utils:BlockHashWithGroupId": ("",),
    "v1.core.block_pool:BlockPool.touch": ("(self, blocks)",),
    "v1.core.block_pool:BlockPool._maybe_evict_cached_block": ("(self, block)",),
    "v1.core.kv_cache_manager:KVCacheManager.empty_kv_cache_blocks": ("",),
    "v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled": (
        "(self, request)",
    ),
    "v1.core.sched.scheduler:Scheduler.hash_block_size": ("",),
    "v1.request:Request.block_hashes": ("is list[BlockHash]",),
    "v1.request:Request.all_token_ids": ("",),
    "v1.request:Request.mm_features": ("",),
    "v1.request:Request.prompt_embeds": ("",),
    "v1.request:RequestStatus.FINISHED_ERROR": ("",),
    "v1.core.kv_cache_utils:BlockHashList": ("",),
    "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.get_all_free_blocks": ("(self)",),
    "v1.core.kv_cache_manager:KVCacheManager.coordinator": ("",),
    "v1.core.kv_cache_manager:KVCacheManager.free": ("(self, request)",),
    "v1.core.kv_cache_manager:KVCacheManager.block_pool": ("",),
    "v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers": ("",),
    "v1.core.sched.async_scheduler:AsyncScheduler": ("class (Scheduler)",),
    "v1.core.sched.scheduler:Scheduler.__init__": (
        "(self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=, mm_registry=, include_finished_set=, log_stats=)",
    ),
    "v1.core.sched.scheduler:Scheduler.add_request": ("(self, request)",),
    "v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": (
        "(self, request)",
        "(self, request, max_cache_hit_length=)",
    ),
    "v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": (
        "(self, request, num_new_tokens, num_new_local_computed_tokens=, num_external_computed_tokens=)",
    ),
    "v1.core.sched.scheduler:Scheduler.update_from_output": (
        "(self, scheduler_output, model_runner_output)",
    ),
    "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
        "(self, scheduler_output)",
    ),
    "v1.core.sched.scheduler:Scheduler.num_spec_tokens": ("",),
    "v1.core.sched.scheduler:Scheduler.make_stats": (
        "(self, spec_decoding_stats=, kv_connector_stats=, cudagraph_stats=, perf_stats=, ec_connector_stats=)",
    ),
    "v1.core.sched.scheduler:Scheduler._free_request": (
        "(self, request, delay_free_blocks=)",
    ),
    "v1.core.sched.scheduler:Scheduler._handle_stopped_request": ("(self, request)",),
    "v1.core.sched.scheduler:Scheduler._update_request_as_session": (
        "(self, session, update)",
    ),
    "v1.core.sched.scheduler:Scheduler.schedule": ("(self, throttle_prefills=)",),
    "v1.core.sched.scheduler:Scheduler.finish_requests": (
        "(self, request_ids, finished_status)",
    ),
    "v1.core.sched.scheduler:Scheduler.shutdown": ("(self)",),
    "v1.core.sched.scheduler:Scheduler.reset_prefix_cache": (
        "(self, reset_running_requests=, reset_connector=)",
    ),
    "v1.core.sched.scheduler:Scheduler._preempt_request": (
        "(self, request, timestamp, drop_stale_output=)",
    ),
    "v1.core.sched.scheduler:Scheduler.running": ("is list[Request]",),
    "v1.core.sched.scheduler:Scheduler.prev_step_scheduled_req_ids": ("is set[str]",),
    "v1.core.sched.scheduler:Scheduler.kv_cache_manager": ("",),
    "v1.core.sched.scheduler:Scheduler.requests": ("is dict[str, Request]",),
    "v1.core.sched.scheduler:Scheduler.grammar_compile_error_reqs": (
        "is set[str]",
        "is dict[str, RequestError]",
    ),
    "v1.core.sched.scheduler:Scheduler.log_stats": ("",),
    "v1.core.sched.scheduler:Scheduler.vllm_config": ("",),
    "v1.core.sched.scheduler:Scheduler.max_model_len": ("",),
    "v1.core.sched.scheduler:Scheduler.kv_cache_config": ("",),
    "v1.core.sched.scheduler:Scheduler.needs_kv_cache_zeroing": ("",),
    "v1.core.sched.output:SchedulerOutput.new_block_ids_to_zero": (
        "is list[int] | None",
    ),
    "v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing": ("(self)",),
    "v1.core.sched.output:SchedulerOutput.num_scheduled_tokens": ("is dict[str, int]",),
    "v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens": ("is int",),
    "v1.core.sched.output:SchedulerOutput.preempted_req_ids": ("is set[str] | None",),
    "v1.core.sched.output:SchedulerOutput.finished_req_ids": ("is set[str]",),
    "v1.request:Request.resumable": ("",),
    "v1.request:Request.sampling_params": ("",),
    "v1.request:Request.num_prompt_tokens": ("",),
    "v1.request:Request.max_tokens": ("",),
    "v1.request:Request.num_tokens": ("(self)",),
    "v1.request:Request.num_output_tokens": ("(self)",),
    "v1.request:Request.num_output_placeholders": ("",),
    "v1.request:Request.num_computed_tokens": ("",),
    "v1.request:Request.structured_output_request": ("",),
    "v1.request:Request.status": ("",),
    "v1.request:Request.drop_stale_output": ("",),
    "v1.request:Request.num_stale_output_tokens": ("",),
    "v1.request:Request.lora_request": ("",),
    "v1.request:Request.session_id": ("",),
    "v1.request:RequestStatus.RUNNING": ("",),
    "v1.request:RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": ("",),
    "v1.structured_output.request:StructuredOutputRequest.params": (
        "is StructuredOutputsParams",
    ),
    "v1.structured_output.request:StructuredOutputRequest._grammar": (
        "is Future[StructuredOutputGrammar] | StructuredOutputGrammar | Exception | None",
    ),
    "sampling_params:StructuredOutputsParams.json_object": ("is bool | None",),
    "sampling_params:SamplingParams.extra_args": ("is dict[str, Any] | None",),
    "sampling_params:SamplingParams.prompt_logprobs": ("is int | None",),
    "outputs:RequestError": ("class ()",),
    "outputs:RequestError.code": ("is str",),
    "outputs:RequestError.message": ("is str",),
    "v1.metrics.stats:SchedulerStats.num_kv_fetch_reqs_by_stage": (
        "is dict[str, int]",
    ),
    "v1.kv_cache_interface:FullAttentionSpec": ("class (AttentionSpec)",),
    "v1.kv_cache_interface:FullAttentionSpec.merge": ("(cls, specs)",),
    "v1.kv_cache_interface:AttentionSpec.unpadded_page_size_bytes": ("(self)",),
    "v1.kv_cache_interface:AttentionSpec.page_size_padded": ("is int | None",),
    "v1.kv_cache_interface:AttentionSpec.page_size_bytes": ("(self)",),
    "v1.kv_cache_interface:KVCacheSpec.max_num_blocks_per_req": (
        "(self, vllm_config, max_len)",
    ),
    "v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": (
        "(self, vllm_config)",
    ),
    "v1.kv_cache_interface:replace_as": ("(spec, target_cls, *, drop=, **changes)",),
    "v1.kv_cache_interface:KVCacheGroupSpec.layer_names": ("is list[str]",),
    "v1.kv_cache_interface:KVCacheGroupSpec.kv_cache_spec": ("is KVCacheSpec",),
    "v1.kv_cache_interface:KVCacheConfig.kv_cache_groups": (
        "is list[KVCacheGroupSpec]",
    ),
    "v1.kv_cache_interface:KVCacheConfig.num_blocks": ("is int",),
    "v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("class (AttentionSpec)",),
    "v1.kv_cache_interface:SlidingWindowSpec": ("class (AttentionSpec)",),
    "v1.core.kv_cache_utils:get_kv_cache_configs": (
        "(vllm_config, kv_cache_specs, available_memory)",
        None,
    ),
    "v1.core.kv_cache_planning:get_kv_cache_configs": (
        None,
        "(vllm_config, kv_cache_specs, available_memory, global_kv_cache_groups)",
    ),
    "v1.core.kv_cache_planning:get_global_kv_cache_groups": (
        None,
        "(vllm_config, kv_cache_specs)",
    ),
    "v1.worker.gpu.attn_utils:get_kv_cache_spec": ("(vllm_config)",),
    "v1.attention.backends.utils:get_supported_kv_cache_layouts": ("(backends)",),
    "v1.attention.backends.utils:resolve_kv_cache_layout": (
        "(vllm_config, supported_layouts, kv_cache_specs=)",
    ),
    "distributed.kv_transfer.kv_connector.utils:get_current_attn_backends": (
        "(vllm_config, layer_names=)",
    ),
    "distributed.parallel_state:init_distributed_environment": (
        "(world_size=, rank=, distributed_init_method=, local_rank=, backend=, timeout=)",
    ),
    "distributed.parallel_state:ensure_model_parallel_initialized": (
        "(tensor_model_parallel_size, pipeline_model_parallel_size, prefill_context_model_parallel_size=, decode_context_model_parallel_size=, backend=)",
    ),
    "distributed.parallel_state:destroy_model_parallel": ("()",),
    "distributed.parallel_state:destroy_distributed_environment": ("()",),
    "model_executor.model_loader.utils:initialize_model": (
        "(vllm_config, *, prefix=, model_class=, model_config=)",
    ),
    "utils.torch_utils:set_default_torch_dtype": ("(dtype)",),
    "usage.usage_lib:UsageContext.OPENAI_API_SERVER": ("",),
    "v1.kv_cache_interface:MambaSpec": ("class (KVCacheSpec)",),
    "v1.kv_cache_interface:MambaSpec.max_memory_usage_bytes": ("(self, vllm_config)",),
    "v1.kv_cache_interface:MambaSpec.page_size_bytes": ("(self)",),
    "model_executor.layers.mamba.abstract:MambaBase": ("class (AttentionLayerBase)",),
    "model_executor.layers.mamba.abstract:MambaBase.kv_cache": (
        "is tuple[torch.Tensor, ...]",
    ),
    "model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache": (
        "(self, kv_cache)",
    ),
    "model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec": (
        "(self, vllm_config)",
    ),
    "model_executor.layers.mamba.abstract:MambaBase.get_attn_backend": ("(self)",),
    "v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("class (KVCacheSpec)",),
    "v1.kv_cache_interface:is_quantized_kv_cache": ("(kv_cache_dtype)",),
    "v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "(cls, kvcache_spec_cls, manager_class=, uniform_type_base_spec=)",
    ),
    "v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": (
        "(cls, vllm_config=)",
    ),
    "v1.attention.backend:AttentionType.DECODER": ("",),
    "v1.attention.backend:AttentionBackend.customize_spec": ("(cls, spec)",),
    "v1.attention.backend:AttentionBackend.get_name": ("()",),
    "v1.attention.backend:AttentionBackend.get_impl_cls": ("()",),
    "v1.attention.backend:AttentionBackend.get_builder_cls": ("()",),
    "v1.attention.backend:AttentionBackend.supports_batch_invariance": ("(cls)",),
    "v1.attention.backend:AttentionBackend.supports_kv_cache_update_bypass": (
        None,
        "is bool",
    ),
    "v1.attention.backend:AttentionBackend.get_preferred_block_size": (
        "(cls, default_block_size)",
    ),
    "v1.attention.backend:AttentionBackend.validate_configuration": (
        "(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, use_per_head_quant_scales, device_capability, attn_type, has_sliding_window=, use_non_causal=, use_batch_invariant=, use_kv_connector=, use_pcp=, use_adaptive_verification=, use_dcp=, use_rswa=)",
    ),
    "v1.attention.backend:AttentionImpl.forward": (
        "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=)",
    ),
    "v1.attention.backend:AttentionImpl.fused_output_quant_supported": (
        "(self, quant_key)",
    ),
    "v1.attention.backend:AttentionMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=)",
    ),
    "v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": (
        "(self, common_attn_metadata)",
    ),
    "v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support": (
        "(cls, vllm_config, kv_cache_spec)",
    ),
    "v1.attention.backend:AttentionMetadataBuilder.supports_update_block_table": (
        "is bool",
    ),
    "v1.attention.backend:AttentionMetadataBuilder.supports_draft_decode_metadata_update": (
        "is bool",
    ),
    "v1.attention.backend:AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE": ("",),
    "v1.attention.backend:CommonAttentionMetadata.query_start_loc": (
        "is torch.Tensor",
    ),
    "v1.attention.backend:CommonAttentionMetadata.query_start_loc_cpu": (
        "is torch.Tensor",
    ),
    "v1.attention.backend:CommonAttentionMetadata.seq_lens": ("is torch.Tensor",),
    "v1.attention.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound": (
        "is torch.Tensor | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata.is_prefilling": (
        "is torch.Tensor | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata.positions": (
        "is torch.Tensor | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata.req_idx": ("is np.ndarray | None",),
    "v1.attention.backend:CommonAttentionMetadata.mm_req_doc_ranges": (
        "is dict[int, list[tuple[int, int]]] | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata.causal": ("is bool | torch.Tensor",),
    "v1.attention.backend:CommonAttentionMetadata.num_reqs": ("is int",),
    "v1.attention.backend:CommonAttentionMetadata.num_actual_tokens": ("is int",),
    "v1.attention.backend:CommonAttentionMetadata.max_query_len": ("is int",),
    "v1.attention.backend:CommonAttentionMetadata.block_table_tensor": (
        "is torch.Tensor",
    ),
    "v1.attention.backend:CommonAttentionMetadata.slot_mapping": ("is torch.Tensor",),
    "v1.attention.backend:CommonAttentionMetadata.max_seq_len": ("is int",),
    "v1.attention.backend:CommonAttentionMetadata._num_computed_tokens_cache": (
        "is torch.Tensor | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata._token_to_req_indices_cache": (
        "is torch.Tensor | None",
    ),
    "v1.attention.backend:CommonAttentionMetadata.replace": ("(self, **kwargs)",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackend": ("class (AttentionBackend)",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.__init__": (
        "(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap=, attn_type=, kv_sharing_target_layer_name=, sinks=)",
    ),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=)",
    ),
    "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__": (
        "(self, kv_cache_spec, layer_names, vllm_config, device)",
    ),
    "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=)",
    ),
    "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.isa": ("",),
    "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers": (
        "(self, layer_names)",
    ),
    "v1.attention.backends.cpu_attn:_get_attn_isa": (
        "(dtype, block_size, head_size=, kv_cache_dtype=)",
    ),
    "v1.attention.backends.flash_attn:FlashAttentionBackend": (
        "class (AttentionBackend)",
    ),
    "v1.attention.backends.flash_attn:FlashAttentionImpl.forward": (
        "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=)",
    ),
    "v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=)",
    ),
    "v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.num_heads_q": ("",),
    "v1.attention.backends.triton_attn:TritonAttentionBackend": (
        "class (AttentionBackend)",
    ),
    "v1.attention.backends.triton_attn:TritonAttentionImpl.forward": (
        "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=)",
    ),
    "v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=)",
    ),
    "v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.num_heads_q": (
        "",
    ),
    "v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN": ("",),
    "v1.attention.backends.registry:AttentionBackendEnum.CUSTOM": ("",),
    "v1.attention.backends.registry:AttentionBackendEnum.FLASH_ATTN": ("",),
    "v1.attention.backends.registry:AttentionBackendEnum.TRITON_ATTN": ("",),
    "v1.attention.backends.registry:AttentionBackendEnum.clear_override": ("(self)",),
    "v1.attention.backends.registry:register_backend": (
        "(backend, class_path=, is_mamba=)",
    ),
    "v1.attention.selector:_cached_get_attn_backend": (
        "(backend, attn_selector_config, num_heads=, *, _run_kv_cache_dtype=)",
    ),
    "v1.attention.selector:AttentionSelectorConfig.head_size": ("is int",),
    "v1.attention.selector:AttentionSelectorConfig.dtype": ("is torch.dtype",),
    "v1.attention.selector:AttentionSelectorConfig.kv_cache_dtype": (
        "is CacheDType | None",
    ),
    "v1.attention.selector:AttentionSelectorConfig.block_size": ("is int | None",),
    "v1.attention.selector:AttentionSelectorConfig.use_mm_prefix": ("is bool",),
    "v1.attention.selector:AttentionSelectorConfig.use_batch_invariant": ("is bool",),
    "v1.worker.cpu_worker:CPUWorker": ("class (Worker)",),
    "v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": ("(self)",),
    "v1.worker.gpu_worker:Worker.init_device": ("(self)",),
    "v1.worker.gpu_worker:Worker.load_model": ("(self, *, load_dummy_weights=)",),
    "v1.worker.gpu_worker:Worker.get_kv_cache_spec": ("(self)",),
    "v1.worker.gpu_worker:Worker.shutdown": ("(self)",),
    "v1.worker.gpu_worker:Worker.initialize_from_config": ("(self, kv_cache_config)",),
    "v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("(self)",),
    "v1.worker.gpu_worker:Worker.execute_model": ("(self, scheduler_output)",),
    "v1.worker.gpu_worker:Worker.sample_tokens": ("(self, grammar_output)",),
    "v1.worker.gpu_worker:Worker.determine_available_memory": ("(self)",),
    "v1.worker.gpu_worker:Worker._maybe_activate_jit_monitor": ("(self)",),
    "v1.worker.gpu_worker:Worker.model_runner": ("is GPUModelRunner",),
    "v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding": (
        "(self, num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, use_cascade_attn=, allow_microbatching=, force_eager=, force_uniform_decode=, force_has_lora=, force_num_active_loras=, num_encoder_reqs=)",
    ),
    "v1.worker.gpu_model_runner:GPUModelRunner._update_states_after_model_execute": (
        "(self, output_token_ids, scheduler_output)",
    ),
    "v1.worker.gpu_model_runner:GPUModelRunner.speculative_config": ("",),
    "v1.worker.gpu_model_runner:GPUModelRunner._attn_group_iterator": ("(self)",),
    "v1.worker.gpu_model_runner:GPUModelRunner.input_batch": ("",),
    "v1.worker.gpu_model_runner:GPUModelRunner.get_model": ("(self)",),
    "v1.worker.gpu_model_runner:GPUModelRunner.device": ("",),
    "v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state": (
        "(self, scheduler_output, dummy_run)",
    ),
    "v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled": (
        "(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=)",
        "(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=, draft_tokens=)",
    ),
    "v1.worker.gpu.model_runner:GPUModelRunner.speculative_config": ("",),
    "v1.worker.gpu.model_runner:GPUModelRunner.attn_groups": ("",),
    "v1.worker.gpu.model_runner:GPUModelRunner.get_model": ("(self)",),
    "v1.worker.gpu.model_runner:GPUModelRunner.device": ("",),
    "v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_select_dummy_loras": (
        "(self, lora_config, num_scheduled_tokens, mapping_type=, num_sampled_tokens=, num_active_loras=)",
    ),
    "v1.worker.utils:AttentionGroup.metadata_builders": (
        "is list[AttentionMetadataBuilder]",
    ),
    "v1.worker.utils:AttentionGroup.kv_cache_spec": ("is KVCacheSpec",),
    "v1.metrics.loggers:StatLoggerManager.__init__": (
        "(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, aggregate_engine_logging=, client_count=)",
    ),
    "v1.metrics.loggers:AggregateStatLoggerBase.__init__": (
        "(self, vllm_config, engine_indexes)",
    ),
    "v1.metrics.loggers:StatLoggerBase.record": (
        "(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)",
    ),
    "v1.metrics.loggers:StatLoggerBase.log": ("(self)",),
    "v1.metrics.loggers:StatLoggerBase.log_engine_initialized": ("(self)",),
    "v1.engine.input_processor:InputProcessor.process_inputs": (
        "(self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, session_id=, kv_hints=)",
    ),
    "v1.engine.input_processor:InputProcessor.vllm_config": ("",),
    "v1.engine:EngineCoreRequest.sampling_params": ("is SamplingParams | None",),
    "v1.engine:EngineCoreRequest.prompt_token_ids": ("is list[int] | None",),
    "v1.engine:EngineCoreRequest.prompt_embeds": ("is torch.Tensor | None",),
    "exceptions:VLLMValidationError.__init__": (
        "(self, message, *, parameter=, value=)",
    ),
    "utils:length_from_prompt_token_ids_or_embeds": (
        "(prompt_token_ids, prompt_embeds)",
    ),
    "utils.math_utils:cdiv": ("(a, b)",),
    "utils.torch_utils:async_tensor_h2d": ("(data, device=, dtype=, out=)",),
    "utils.torch_utils:kv_cache_dtype_str_to_dtype": (
        "(kv_cache_dtype, model_config)",
    ),
    "utils.import_utils:resolve_obj_by_qualname": ("(qualname)",),
    "utils.mem_utils:format_gib": ("(b)",),
    "engine.arg_utils:EngineArgs": ("class ()",),
    "engine.arg_utils:EngineArgs.hf_overrides": ("is HfOverrides",),
    "engine.arg_utils:EngineArgs.max_model_len": ("is int",),
    "engine.arg_utils:EngineArgs.hf_config_path": ("is str | None",),
    "engine.arg_utils:EngineArgs.trust_remote_code": ("is bool",),
    "engine.arg_utils:EngineArgs.revision": ("is str | None",),
    "engine.arg_utils:EngineArgs.code_revision": ("is str | None",),
    "engine.arg_utils:EngineArgs.config_format": ("is str",),
    "engine.arg_utils:EngineArgs.hf_token": ("is bool | str | None",),
    "transformers_utils.config:get_config": (
        "(model, trust_remote_code, revision=, code_revision=, config_format=, hf_overrides_kw=, hf_overrides_fn=, **kwargs)",
    ),
    "transformers_utils.config:get_hf_text_config": ("(config)",),
    "engine.arg_utils:EngineArgs.scheduler_cls": ("is str | type[object] | None",),
    "engine.arg_utils:EngineArgs.worker_cls": ("is str",),
    "engine.arg_utils:EngineArgs.additional_config": ("is dict[str, Any]",),
    "engine.arg_utils:EngineArgs.__post_init__": ("(self)",),
    "engine.arg_utils:EngineArgs.add_cli_args": ("(parser)",),
    "engine.arg_utils:EngineArgs.create_engine_config": (
        "(self, usage_context=, headless=)",
    ),
    "engine.arg_utils:AsyncEngineArgs": ("class (EngineArgs)",),
    "envs:environment_variables": ("is dict[str, Callable[[], Any]]",),
    "forward_context:set_forward_context": (
        "(attn_metadata, vllm_config, num_tokens=, num_tokens_across_dp=, cudagraph_runtime_mode=, batch_descriptor=, ubatch_slices=, slot_mapping=, skip_compiled=, is_padding=)",
    ),
    "config.vllm:set_current_vllm_config": ("(vllm_config, check_compile=, prefix=)",),
    "config.vllm:get_current_vllm_config": ("()",),
    "config.vllm:get_layers_from_vllm_config": (
        "(vllm_config, layer_type, layer_names=)",
    ),
    "config.vllm:VllmConfig.additional_config": ("is dict | SupportsHash",),
    "config.vllm:VllmConfig.use_v2_model_runner": ("(self)",),
    "config.vllm:VllmConfig.speculative_config": ("is SpeculativeConfig | None",),
    "config.vllm:VllmConfig.num_speculative_tokens": ("(self)",),
    "config.speculative:SpeculativeConfig.method": ("is SpeculativeMethod | None",),
    "v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens": (
        "is dict[str, list[int]]",
    ),
    "v1.outputs:ModelRunnerOutput.sampled_token_ids": ("is list[list[int]]",),
    "v1.outputs:ModelRunnerOutput.req_id_to_index": ("is dict[str, int]",),
    "v1.request:Request.spec_token_ids": ("is list[int]",),
    "config.vllm:VllmConfig.aux_output_config": ("is AuxOutputConfig",),
    "config.aux_output:AuxOutputConfig.enabled": ("(self)",),
    "config.vllm:VllmConfig.kv_transfer_config": ("is KVTransferConfig | None",),
    "config.vllm:VllmConfig.max_concurrent_batches": ("(self)",),
    "config.cache:CacheDType": ("",),
    "config.cache:CacheConfig.block_size": ("is int",),
    "config.cache:CacheConfig.cache_dtype": (
        "is CacheDType",
        "is CacheDType | str",
    ),
    "config.cache:CacheConfig.user_specified_block_size": ("is bool",),
    "config.cache:CacheConfig.sliding_window": ("is int | None",),
    "config.cache:CacheConfig.kv_cache_memory_bytes": ("is int | None",),
    "config.cache:CacheConfig.kv_offloading_size": ("is float | None",),
    "config.scheduler:SchedulerConfig.scheduler_cls": ("is str | type[object] | None",),
    "config.scheduler:SchedulerConfig.max_num_seqs": ("is int",),
    "config.scheduler:SchedulerConfig.max_num_batched_tokens": ("is int",),
    "config.scheduler:SchedulerConfig.async_scheduling": ("is bool | None",),
    "config.scheduler:SchedulerConfig.disable_hybrid_kv_cache_manager": (
        "is bool | None",
    ),
    "config.parallel:ParallelConfig.worker_cls": ("is str",),
    "config.parallel:ParallelConfig.decode_context_parallel_size": ("is int",),
    "config.parallel:ParallelConfig.prefill_context_parallel_size": ("is int",),
    "config.parallel:ParallelConfig.pipeline_parallel_size": ("is int",),
    "config.parallel:ParallelConfig.tensor_parallel_size": ("is int",),
    "config.parallel:ParallelConfig.data_parallel_size": ("is int",),
    "config.parallel:ParallelConfig.enable_eplb": ("is bool",),
    "config.parallel:ParallelConfig.enable_dbo": ("is bool",),
    "config.parallel:ParallelConfig.use_ubatching": ("(self)",),
    "config.parallel:ParallelConfig.ubatch_size": ("is int",),
    "config.parallel:ParallelConfig.rank": ("is int",),
    "config.parallel:ParallelConfig.world_size_across_dp": ("(self)",),
    "config.parallel:ParallelConfig._api_process_count": ("is int",),
    "config.attention:AttentionConfig.backend": ("is AttentionBackendEnum | None",),
    "config.attention:AttentionConfig.backend_per_kind": (
        "is dict[str, AttentionBackendEnum]",
    ),
    "config.compilation:CompilationConfig.static_forward_context": (
        "is dict[str, Any]",
    ),
    "config.model:ModelConfig.is_attention_free": ("(self)",),
    "config.model:ModelConfig.is_hybrid": ("(self)",),
    "config.model:ModelConfig.is_diffusion": ("(self)",),
    "config.model:ModelConfig.use_mla": ("(self)",),
    "config.model:ModelConfig.is_encoder_decoder": ("(self)",),
    "config.model:ModelConfig.runner_type": ("",),
    "config.model:ModelConfig.hf_text_config": ("is PreTrainedConfig",),
    "config.model:ModelConfig.hf_config": ("is PreTrainedConfig",),
    "config.model:ModelConfig.get_head_size": ("(self)",),
    "config.model:ModelConfig.get_num_kv_heads": (
        "(self, parallel_config, arch_config=)",
    ),
    "config.model:ModelConfig.get_num_attention_heads": (
        "(self, parallel_config, arch_config=)",
    ),
    "config.model:ModelConfig.get_total_num_kv_heads": ("(self)",),
    "config.model:ModelConfig.get_total_num_hidden_layers": ("(self)",),
    "config.model:ModelConfig.get_vocab_size": ("(self)",),
    "config.model:ModelConfig.uses_mrope": ("(self)",),
    "config.model:ModelConfig.supports_multimodal_inputs": ("(self)",),
    "config.model:ModelConfig.is_mm_prefix_lm": ("(self)",),
    "config.model:ModelConfig.max_model_len": ("is int",),
    "config.model:ModelConfig.served_model_name": ("is str | list[str] | None",),
    "config.model:ModelConfig.dtype": ("is ModelDType | torch.dtype",),
    "distributed.parallel_state:get_tp_group": ("()",),
    "distributed.parallel_state:get_tensor_model_parallel_rank": ("()",),
    "distributed.parallel_state:GroupCoordinator.broadcast_object": (
        "(self, obj=, src=)",
    ),
    "distributed.parallel_state:GroupCoordinator.all_gather": ("(self, input_, dim=)",),
    "distributed.parallel_state:GroupCoordinator.world_size": ("is int",),
    "distributed.parallel_state:GroupCoordinator.device": ("",),
    "model_executor.layers.rotary_embedding:_ROPE_DICT": (
        "is dict[tuple[Any, ...], RotaryEmbedding]",
    ),
    "model_executor.layers.linear:RowParallelLinear": ("class (LinearBase)",),
    "model_executor.layers.attention.attention:Attention.impl": ("",),
    "model_executor.layers.attention.attention:Attention.kv_cache": ("",),
    "model_executor.layers.attention.attention:Attention.layer_name": ("",),
    "model_executor.layers.attention.attention:Attention.head_size": ("",),
    "model_executor.layers.attention.attention:Attention.head_size_v": ("",),
    "model_executor.layers.attention.attention:Attention.sliding_window": ("",),
    "model_executor.models.interfaces:requires_raw_input_tokens": ("(model)",),
    "model_executor.models.utils:extract_layer_index": (
        "(layer_name, num_attn_module=)",
    ),
    "tokenizers:cached_tokenizer_from_config": ("",),
    "tokenizers.detokenizer_utils:detokenize_incrementally": (
        "(tokenizer, all_input_ids, prev_tokens, prefix_offset, read_offset, skip_special_tokens=, spaces_between_special_tokens=)",
    ),
    "utils.argparse_utils:FlexibleArgumentParser": ("class (ArgumentParser)",),
    "platforms.interface:Platform.is_cpu": ("(self)",),
    "platforms.interface:Platform.is_cuda": ("(self)",),
    "platforms.interface:Platform.device_name": ("is str",),
    "platforms.interface:Platform.update_block_size_for_backend": (
        "(cls, vllm_config)",
    ),
    "platforms.interface:Platform.get_device_capability": ("(cls, device_id=)",),
    "logger:init_logger": ("(name)",),
    "platforms:current_platform": ("is Platform",),
    "v1.kv_cache_interface:AttentionSpec.__post_init__": ("(self)",),
    "config.cache:CacheConfig.num_gpu_blocks": ("is int | None",),
    "config.model:ModelConfig.original_max_model_len": ("",),
    "envs:VLLM_BATCH_INVARIANT": ("is bool",),
    "entrypoints.llm:LLM.collective_rpc": ("(self, method, timeout=, args=, kwargs=)",),
    "entrypoints.llm:LLM.get_tokenizer": ("(self)",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.alibi_slopes": ("",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.sinks": ("",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.logits_soft_cap": ("",),
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.kv_sharing_target_layer_name": (
        "",
    ),
    "v1.attention.backends.flash_attn:FlashAttentionImpl.alibi_slopes": ("",),
    "v1.attention.backends.flash_attn:FlashAttentionImpl.sinks": ("",),
    "v1.attention.backends.flash_attn:FlashAttentionImpl.logits_soft_cap": ("",),
    "v1.attention.backends.flash_attn:FlashAttentionImpl.kv_sharing_target_layer_name": (
        "",
    ),
    "v1.attention.backends.triton_attn:TritonAttentionImpl.alibi_slopes": ("",),
    "v1.attention.backends.triton_attn:TritonAttentionImpl.sinks": ("",),
    "v1.attention.backends.triton_attn:TritonAttentionImpl.logits_soft_cap": ("",),
    "v1.attention.backends.triton_attn:TritonAttentionImpl.kv_sharing_target_layer_name": (
        "",
    ),
    "v1.worker.gpu_input_batch:InputBatch.req_ids": ("(self)",),
    "v1.worker.gpu.model_runner:BatchReqState.req_ids": ("is list[str]",),
    "model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase.cos_sin_cache": (
        "is torch.Tensor",
    ),
    "v1.core.sched.scheduler:Scheduler._build_kv_connector_meta": (
        "(self, connector, scheduler_output)",
    ),
    "v1.core.sched.scheduler:Scheduler.connector": ("",),
    "distributed.kv_transfer:get_kv_transfer_group": ("",),
    "distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions": (
        "(self, kv_connector_metadata)",
    ),
    "distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector.sub_connectors": (
        "(self)",
    ),
    "distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": (
        "class (KVConnectorBase_V1, SupportsHMA)",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector": (
        "class (KVConnectorBase_V1, SupportsHMA)",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector.scheduler": (
        "(self)",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._req_status": (
        "is dict[ReqId, RequestOffloadState]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._jobs": (
        "is dict[int, TransferJobStatus]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._block_id_to_pending_jobs": (
        "is dict[int, set[int]]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState.transfer_jobs": (
        "is set[int]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState.group_states": (
        "is tuple[RequestGroupState, ...]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestGroupState.block_ids": (
        "is list[int]",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:TransferJobStatus.fenced_block_ids": (
        "is list[int] | None",
    ),
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler:TransferJobStatus.deferred_fence_block_ids": (
        "is list[int] | None",
    ),
    "distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector:SimpleCPUOffloadConnector": (
        "class (KVConnectorBase_V1, SupportsHMA)",
    ),
    "distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector:SimpleCPUOffloadConnector.scheduler_manager": (
        "is SimpleCPUOffloadScheduler | None",
    ),
    "v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler._reqs_to_store": (
        "is dict[str, StoreRequestState]",
    ),
    "v1.simple_kv_offload.manager:StoreRequestState.block_ids": (
        "is tuple[list[int], ...]",
    ),
}
