"""The fields of the engine's configuration: in the key, or irrelevant for a given reason.

The facts of a namespace are made from this table. Tests compare it, that of the classes without
facts and the variables with vLLM 0.29 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = "the same computation in another order or by another kernel; rounding at most"
SCHEDULING = "decides when and with what else a token is computed, not what is computed of it"
PLACEMENT = "decides where data or processes are, not what they hold"
WATCHING = "tells people or programs how the engine does"
SAMPLING = "decides which tokens come next; tokens are in the block hashes"
PROMPTS = "decides which tokens a prompt has, or which prompts are taken; tokens are in the hashes"
HASHED = "part of the block hashes, or of the mark of a request"
LIMITS = "a limit: what is beyond it is refused"
DERIVED = "computed from other fields, which are in the key"
HANDED_ON = "handed on to a field of another class of this table"
STATES = "about where recurrent states are kept, and which of them"
WEIGHTS = "decides how weights reach the device, not which"
CAPACITY = "how many blocks there are, or bytes for them"
REFUSED = "kvtiers refuses to start with it"

OWN = "a configuration with rows of its own"
BY_WEIGHTS = "in the key: the content of the weights stands for it (see `identity.weights`)"
BY_CONFIG = "in the key: through the digest of the model's own configuration"
AS_MADE = "in the key: through what the model as made says of itself (see `identity.made`)"
BY_LAYOUT = "in the key: through the layout of the paged KV, and its groups"
BY_DEVICE = "in the key: as the device, and what each layer's attention is"
BY_RANK = "in the key: through the ranks' numbers and their layers' shapes"
BY_SALT = "in the key: the chain's salt; its other settings don't change what a block is"


@dataclass(frozen=True)
class Fields:
    """The fields of one class, as names separated by blanks: those in the `key`, whose values are
    facts, and all others by the reason `why` it does not need them."""

    key: str
    why: dict[str, str]

    @property
    def keyed(self) -> tuple[str, ...]:
        """The names of the fields whose values are facts."""
        return tuple(self.key.split())

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self.key.split()).union(*(names.split() for names in self.why.values()))


PARTS = {
    "VllmConfig": {
        "model_config": "ModelConfig",
        "cache_config": "CacheConfig",
        "parallel_config": "ParallelConfig",
        "load_config": "LoadConfig",
        "attention_config": "AttentionConfig",
        "kernel_config": "KernelConfig",
        "lora_config": "LoRAConfig",
        "speculative_config": "SpeculativeConfig",
        "compilation_config": "CompilationConfig",
        "kv_transfer_config": "KVTransferConfig",
        "scheduler_config": "SchedulerConfig",
    },
    "ModelConfig": {"multimodal_config": "MultiModalConfig"},
}
"""By class, the fields that contain another configuration, and its class: one with facts, or one to
which a newer engine may add some."""

FIELDS = {
    "VllmConfig": Fields(
        "additional_config",
        {
            OWN: "model_config cache_config parallel_config scheduler_config device_config "
            "load_config offload_config attention_config aux_output_config engram_config "
            "mamba_config kernel_config lora_config speculative_config watermark_config "
            "diffusion_config structured_outputs_config observability_config logging_config "
            "compilation_config profiler_config kv_transfer_config kv_events_config "
            "ec_transfer_config ec_manager_config reasoning_config weight_transfer_config "
            "watchdog_config",
            DERIVED: "quant_config",
            ROUNDING: "optimization_level performance_mode",
            PLACEMENT: "instance_id shutdown_timeout",
        },
    ),
    "ModelConfig": Fields(
        "convert trust_remote_code dtype code_revision quantization quantization_config "
        "disable_sliding_window model_class_overrides model_impl runner",
        {
            OWN: "multimodal_config pooler_config",
            BY_WEIGHTS: "model model_weights revision seed word_embeddings_untied_by_checkpoint",
            BY_CONFIG: "hf_config hf_text_config hf_config_path hf_overrides config_format "
            "is_submodel_config",
            AS_MADE: "max_model_len generation_config override_generation_config",
            PROMPTS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
            "allowed_local_media_path allowed_media_domains io_processor_plugin "
            "renderer_num_workers",
            HASHED: "enable_prompt_embeds",
            SAMPLING: "max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask "
            "logits_processors spec_target_max_model_len",
            ROUNDING: "enforce_eager disable_cascade_attn",
            WATCHING: "served_model_name enable_return_routed_experts enable_trace_replay",
            WEIGHTS: "hf_token allow_deprecated_quantization",
            PLACEMENT: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
            HANDED_ON: "language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs "
            "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
            "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
            "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings "
            "skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
            "mm_ipc_gpu_memory_gb mm_device_do_normalize mm_processor_device",
        },
    ),
    "MultiModalConfig": Fields(
        "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize "
        "mm_hasher_algorithm mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "video_pruning_rate video_pruning_method allow_missing_mm_embeddings",
        {
            LIMITS: "limit_per_prompt",
            HASHED: "enable_mm_embeds",
            PROMPTS: "interleave_mm_strings",
            ROUNDING: "mm_encoder_tp_mode mm_encoder_attn_backend",
            PLACEMENT: "mm_processor_cache_gb mm_processor_cache_type mm_tensor_ipc "
            "mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb skip_mm_profiling "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        },
    ),
    "CacheConfig": Fields(
        "cache_dtype kv_cache_layout sliding_window prefix_caching_hash_algo "
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill swa_bounded_replay mamba_cache_dtype "
        "mamba_ssm_cache_dtype replayssm_buffer_len use_replayssm use_kda_recoverssm",
        {
            BY_LAYOUT: "block_size effective_attention_block_size",
            HASHED: "hash_block_size prefix_match_unit cache_hit_alignment_tokens",
            SCHEDULING: "user_specified_block_size user_specified_mamba_block_size "
            "_block_size_resolved enable_prefix_caching prefix_cache_retention_interval "
            "is_attention_free",
            CAPACITY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks "
            "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend skip_page_size_padded "
            "simple_cpu_offload_num_blocks",
            STATES: "mamba_page_size_padded mamba_block_size mamba_cache_mode "
            "enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache",
        },
    ),
    "ParallelConfig": Fields(
        "tensor_parallel_size pipeline_parallel_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size worker_cls sd_worker_cls worker_extension_cls",
        {
            OWN: "eplb_config fault_tolerance_config",
            BY_RANK: "world_size rank",
            REFUSED: "prefill_context_parallel_size enable_fault_tolerance",
            BY_LAYOUT: "decode_context_parallel_size",
            ROUNDING: "dcp_comm_backend dcp_q_replicate enable_hc_sp enable_expert_parallel "
            "enable_batch_sharded_sampling enable_eplb expert_placement_strategy all2all_backend "
            "disable_custom_all_reduce",
            SCHEDULING: "dp_sync_interval enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold disable_nccl_for_dp_synchronization is_moe_model "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds",
            WEIGHTS: "enable_ep_weight_filter max_parallel_loading_workers",
            PLACEMENT: "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port "
            "data_parallel_master_port data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb data_parallel_index enable_shm_tensor_arena "
            "enable_elastic_ep elastic_ep_max_dp_size ray_workers_use_nsight ray_runtime_env "
            "placement_group distributed_executor_backend master_addr master_port node_rank "
            "nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "_data_parallel_master_port_list _coord_store_port _api_process_count "
            "_api_process_rank _allow_auto_resolve_cp_interleave_size",
        },
    ),
    "LoadConfig": Fields(
        "load_format model_loader_extra_config ignore_patterns",
        {
            WEIGHTS: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location"
        },
    ),
    "AttentionConfig": Fields(
        "backend backend_per_kind flash_attn_version use_trtllm_attention "
        "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
        "use_fp4_indexer_cache indexer_sparse_logits hisparse_config use_non_causal "
        "trtllm_ragged_backend mla_prefill_backend",
        {
            ROUNDING: "minimax_m3_msa_decode_backend flash_attn_max_num_splits_for_cuda_graph "
            "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
            "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
            "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
            "indexer_tp_shard_min_rows minimax_m3_indexer_cp"
        },
    ),
    "KernelConfig": Fields(
        "moe_backend linear_backend linear_backend_per_quant monokernel",
        {
            OWN: "ir_op_priority",
            ROUNDING: "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
            "enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend "
            "enable_bf16x3_router_gemm",
        },
    ),
    "LoRAConfig": Fields(
        "lora_dtype target_modules default_mm_loras enable_tower_connector_lora "
        "enable_moe_shared_loras",
        {
            LIMITS: "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
            ROUNDING: "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format",
        },
    ),
    "SpeculativeConfig": Fields(
        "method model revision code_revision quantization kv_cache_dtype attention_backend "
        "parallel_drafting use_heterogeneous_vocab index_share_for_mtp_iteration "
        "disable_lookahead_block_hashes",
        {
            DERIVED: "target_model_config target_parallel_config draft_model_config "
            "draft_parallel_config draft_load_config tensor_parallel_size",
            ROUNDING: "enforce_eager moe_backend draft_tensor_parallel_size "
            "use_local_argmax_reduction",
            LIMITS: "max_model_len",
            SCHEDULING: "num_speculative_tokens num_speculative_tokens_per_batch_size "
            "disable_padded_drafter_batch disable_eagle_block_drop enable_adaptive_verification "
            "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob",
            SAMPLING: "rejection_sample_method synthetic_acceptance_rates dspark_draft_topk "
            "synthetic_acceptance_length draft_sample_method draft_lm_head_quantization "
            "fly_window_size fly_entropy_threshold fly_entropy_top_k xpress_topc",
        },
    ),
    "CompilationConfig": Fields(
        "inductor_passes",
        {
            OWN: "pass_config dynamic_shapes_config",
            BY_DEVICE: "static_forward_context",
            ROUNDING: "mode backend custom_ops ir_enable_torch_wrap splitting_ops "
            "compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets "
            "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
            "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
            "decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints "
            "inductor_compile_config cudagraph_mode cudagraph_num_of_warmups "
            "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
            "use_inductor_graph_partition max_cudagraph_capture_size fast_moe_cold_start "
            "static_all_moe_layers",
            PLACEMENT: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir",
            WATCHING: "enabled_custom_ops disabled_custom_ops traced_files compilation_time "
            "encoder_compilation_time",
        },
    ),
    "KVTransferConfig": Fields(
        "enable_permute_local_kv",
        {
            BY_SALT: "kv_connector_extra_config",
            PLACEMENT: "kv_connector engine_id kv_buffer_device kv_buffer_size kv_role kv_port "
            "kv_ip kv_parallel_size kv_rank kv_connector_module_path kv_load_failure_policy",
        },
    ),
    "SchedulerConfig": Fields(
        "",
        {
            BY_LAYOUT: "disable_hybrid_kv_cache_manager",
            LIMITS: "max_model_len max_num_queued_reqs max_num_queued_tokens",
            SCHEDULING: "is_encoder_decoder runner_type max_num_batched_tokens "
            "max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
            "long_prefill_token_threshold long_prefill_token_threshold_adaptive "
            "enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens "
            "encoder_cache_size policy disable_chunked_mm_input scheduler_cls "
            "scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling "
            "stream_interval",
        },
    ),
}

_VARIABLES = (
    "VLLM_B12X_ VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_ VLLM_CPU_INT4_ VLLM_DEEPEPLL_NVFP4_ "
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_ VLLM_DISABLED_KERNELS VLLM_FLASHINFER_MOE_ VLLM_FLOAT32_ "
    "VLLM_HUMMING_ VLLM_KIMI_K3_AUX_ VLLM_MARLIN_ VLLM_MOE_ROUTING_ VLLM_MOE_USE_ VLLM_MXFP "
    "VLLM_ROCM_AITER_ VLLM_ROCM_FP8_ VLLM_ROCM_MO VLLM_ROCM_MUSE_ VLLM_ROCM_QUICK_ "
    "VLLM_ROCM_SHUFFLE_ VLLM_ROCM_USE_ VLLM_TEST_FORCE_LOAD_ VLLM_USE_DEEP_GEMM "
    "VLLM_USE_FLASHINFER_MOE_ VLLM_USE_MODELSCOPE VLLM_VIDEO_LOADER_ VLLM_XPU_INC_"
)
VARIABLES = tuple(_VARIABLES.split())
"""How names begin of environment variables that decide what vLLM computes, or how coarsely."""
