"""The configuration classes that have no facts, and why: the rest of `config_fields`."""

from __future__ import annotations

from tiers.engine.identity.config_fields import (
    BY_CONFIG,
    BY_DEVICE,
    PLACEMENT,
    PROMPTS,
    ROUNDING,
    SAMPLING,
    SCHEDULING,
    WATCHING,
    Fields,
)

OUTPUTS = "decides what is made of the last layer's output"
DIFFUSION = "kvtiers refuses models whose KV depends on later tokens"
ENCODER = "where the outputs of the model's own encoder are computed; what they are of is hashed"
PROFILING = "made-up inputs, which are no requests, to measure memory"
NO_SETTING = "no setting: a pair of numbers"
RESET = "weights that are changed while the engine runs end with a reset of the cache"

NEEDLESS = {
    "AuxOutputConfig": Fields("", {WATCHING: "enable_return_routed_experts max_bytes"}),
    "DynamicShapesConfig": Fields("", {ROUNDING: "type evaluate_guards assume_32_bit_indexing"}),
    "WatchdogConfig": Fields("", {WATCHING: "timeout check_interval dump_dir"}),
    "DeviceConfig": Fields("", {BY_DEVICE: "device device_type"}),
    "DiffusionConfig": Fields("", {DIFFUSION: "canvas_length max_denoising_steps"}),
    "EncoderCacheManagerConfig": Fields(
        "",
        {PLACEMENT: "encoder_cache_manager_cls manager_config"},
    ),
    "ECTransferConfig": Fields(
        "",
        {
            ENCODER: "ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port "
            "ec_connector_extra_config ec_connector_module_path mm_encoder_output_widths "
            "ec_rank ec_parallel_size"
        },
    ),
    "EngramConfig": Fields(
        "",
        {PLACEMENT: "cpu_offload embedding_across_dp dp_shared_memory use_thp"},
    ),
    "FaultToleranceConfig": Fields("", {SCHEDULING: "engine_recovery_timeout_sec"}),
    "KVEventsConfig": Fields(
        "",
        {
            WATCHING: "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
            "max_queue_size topic"
        },
    ),
    "LoggingConfig": Fields(
        "",
        {WATCHING: "log_level formatter configure_logging pylogging_config_file"},
    ),
    "MambaConfig": Fields(
        "",
        {
            ROUNDING: "backend enable_stochastic_rounding stochastic_rounding_philox_rounds "
            "ssu_algorithm"
        },
    ),
    "BaseDummyOptions": Fields("", {PROFILING: "count"}),
    "VideoDummyOptions": Fields("", {PROFILING: "num_frames width height"}),
    "ImageDummyOptions": Fields("", {PROFILING: "width height"}),
    "AudioDummyOptions": Fields("", {PROFILING: "length"}),
    "ObservabilityConfig": Fields(
        "",
        {
            WATCHING: "show_hidden_metrics_for_version otlp_traces_endpoint "
            "collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics "
            "kv_cache_metrics_sample "
            "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
            "enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details "
            "jit_monitor_mode jit_monitor_verbose"
        },
    ),
    "UVAOffloadConfig": Fields("", {PLACEMENT: "cpu_offload_gb cpu_offload_params"}),
    "PrefetchOffloadConfig": Fields(
        "",
        {PLACEMENT: "offload_group_size offload_num_in_group offload_prefetch_step offload_params"},
    ),
    "OffloadConfig": Fields("", {PLACEMENT: "offload_backend uva prefetch"}),
    "EPLBConfig": Fields(
        "",
        {
            PLACEMENT: "window_size step_interval num_redundant_experts log_balancedness "
            "log_balancedness_interval use_async policy communicator "
            "enable_migration_batching"
        },
    ),
    "PoolerConfig": Fields(
        "",
        {
            OUTPUTS: "task pooling_type seq_pooling_type tok_pooling_type use_activation "
            "enable_flash_late_interaction dimensions enable_chunked_processing "
            "max_embed_len logit_mean logit_sigma step_tag_id returned_token_ids"
        },
    ),
    "ProfilerConfig": Fields(
        "",
        {
            WATCHING: "profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir "
            "proton_context proton_data proton_backend proton_mode proton_hook "
            "proton_output_format proton_graph_attribution torch_profiler_with_stack "
            "torch_profiler_with_flops torch_profiler_use_gzip "
            "torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
            "torch_profiler_with_memory capture_torch_profiler detailed_trace_annotation "
            "ignore_frontend delay_iterations max_iterations warmup_iterations "
            "active_iterations wait_iterations"
        },
    ),
    "ReasoningConfig": Fields(
        "",
        {
            SAMPLING: "reasoning_parser reasoning_start_str reasoning_end_str "
            "_reasoning_start_token_ids _reasoning_end_token_ids "
            "_natural_reasoning_end_token_ids _enabled"
        },
    ),
    "SpeechToTextParams": Fields(
        "",
        {
            PROMPTS: "audio stt_config model_config language hotwords task_type request_prompt "
            "to_language"
        },
    ),
    "SpeechToTextConfig": Fields(
        "",
        {PROMPTS: "sample_rate max_audio_clip_s overlap_chunk_second min_energy_split_window_size"},
    ),
    "StructuredOutputsConfig": Fields(
        "",
        {
            SAMPLING: "backend disable_any_whitespace disable_additional_properties "
            "reasoning_parser reasoning_parser_plugin enable_in_reasoning"
        },
    ),
    "Range": Fields("", {NO_SETTING: "start end"}),
    "WatermarkConfig": Fields(
        "",
        {
            SAMPLING: "key algorithm alpha context_width deduplicate_contexts "
            "deduplicate_contexts_max_history prf allow_target_only_watermarking"
        },
    ),
    "WeightTransferConfig": Fields("", {RESET: "backend"}),
    "HiSparseConfig": Fields("", {"in AttentionConfig": "device_buffer_size eager_host_mirror"}),
    "IrOpPriorityConfig": Fields("", {ROUNDING: "rms_norm fused_add_rms_norm gelu_and_mul_sparse"}),
    "PassConfig": Fields(
        "",
        {
            ROUNDING: "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops "
            "fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla "
            "fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
            "rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb enable_sp "
            "fuse_gemm_comms sp_min_token_num"
        },
    ),
    "QuantSpec": Fields("", {"in ModelConfig.quantization_config": "weight activation"}),
    "QuantizationConfigArgs": Fields(
        "", {"in ModelConfig.quantization_config": "linear moe ignore targets"}
    ),
    "ModelArchitectureConfig": Fields(
        "",
        {
            BY_CONFIG: "architectures model_type text_model_type hidden_size "
            "total_num_hidden_layers total_num_attention_heads head_size vocab_size "
            "total_num_kv_heads num_experts num_experts_per_token quantization_config "
            "is_deepseek_mla is_mm_prefix_lm rswa_window derived_max_model_len_and_key "
            "per_layer_overrides"
        },
    ),
}
