"""A probe for each internal of vLLM that this package reads, calls, subclasses or sets.

A release may change an internal without notice, so what decides whether an engine may start is not
vLLM's version but its functions and classes: :func:`require` compares them with :data:`PROBES` when
a model is built, before anything is allocated. A probe looks at a signature, at an attribute, or at
what a function does with a small tensor; all of them take a few milliseconds. What is patched has
its own records in :mod:`vllm_fp8rl.patches.ledger`, which are checked here too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from vllm_fp8rl import compat
from vllm_fp8rl.patches.ledger import ENGINE_CORE, GATES, WORKER, Patch

_ALWAYS = "worker"


@dataclass(frozen=True)
class Probe:
    """What one function, class or module of vLLM must have."""

    row: int
    """Number of the row in docs/upgrading.md."""
    module: str
    """Module in the package ``vllm``."""
    target: str = ""
    """``name`` or ``Class.name`` in the module; empty for the module itself."""
    positional: int | None = None
    """Number of arguments that this package passes by position, ``self`` included; None where the
    signature does not matter."""
    keywords: str = ""
    """Names of the arguments that it passes by name, separated by blanks."""
    attributes: str = ""
    """Attributes that the target has, declares, or sets in its code, separated by blanks."""
    behaves: Callable[[Any], bool] | None = None
    """Returns whether the target does what it must do."""
    needs: str = _ALWAYS
    """Features of an engine that uses the internal, separated by blanks: ``worker`` (every process
    with a model), ``client`` (the process that refits), ``doctor``, ``cpu``, ``cuda``,
    ``experts``, ``mla`` (multi-latent attention), ``linear_attention``, ``lora``, ``compiled``,
    ``sleep``, ``transfer`` (of weights or KV blocks), ``rotary`` (``rope_dtype: float32``),
    ``exact``."""

    @property
    def name(self) -> str:
        """``vllm.module.Class.name``."""
        return ".".join(filter(None, ("vllm", self.module, self.target)))

    def lacks(self) -> str | None:
        """Return what this vLLM lacks, as the end of a sentence; None if the probe passes."""
        try:
            target: Any = import_module(f"vllm.{self.module}")
        except Exception as error:  # whatever a module raises that misses its kernels
            return f"cannot be imported ({type(error).__name__}: {error})"
        for part in filter(None, self.target.split(".")):
            target = getattr(target, part, None)
        if target is None:
            return "is missing"
        if self.positional is not None:
            try:
                by_name = dict.fromkeys(self.keywords.split())
                inspect.signature(target).bind(*[None] * self.positional, **by_name)
            except TypeError as error:
                return f"has another signature ({error})"
        missing = [name for name in self.attributes.split() if not _has(target, name)]
        if missing:
            return f"has no '{missing[0]}'"
        try:
            works = self.behaves is None or self.behaves(target)
        except Exception as error:
            return f"fails on a small example ({type(error).__name__}: {error})"
        return None if works else "gives another result on a small example"


def failures(features: Collection[str]) -> list[str]:
    """Return a sentence for each probe that fails.

    Args:
        features: see :attr:`Probe.needs`. Modules of other features are not imported.
    """
    problems, release = [], compat.installed_version()
    for patch in patched(features):
        try:
            patch.check()
        except UnsupportedError as error:
            problems.append(str(error))
    for probe in chosen(features):
        reason = probe.lacks()
        if reason is not None:
            problems.append(
                f"fp8rl relies on '{probe.name}', which {reason} in vLLM {release} "
                f"(docs/upgrading.md, row {probe.row}); {compat.remedy()}."
            )
    return problems


def require(features: Collection[str]) -> None:
    """Raise UnsupportedError for the first probe that fails."""
    for problem in failures(features):
        raise UnsupportedError(problem)


def chosen(features: Collection[str]) -> list[Probe]:
    """Return the probes that concern an engine with certain features."""
    return [probe for probe in PROBES if set(probe.needs.split()) <= set(features)]


def patched(features: Collection[str]) -> list[Patch]:
    """Return the patches of such an engine whose modules this process has imported."""
    patches = (*ENGINE_CORE, *WORKER) if _ALWAYS in features else ()
    if "client" in features:
        patches += GATES
    return [patch for patch in patches if patch.module in sys.modules]


def _has(target: Any, name: str) -> bool:
    if hasattr(target, name):
        return True
    if not inspect.isclass(target):
        return name in _names_in(target)
    return any(
        name in inspect.get_annotations(kind) or name in _names_in(vars(kind).get("__init__"))
        for kind in target.__mro__
    )


def _names_in(function: Any) -> tuple[str, ...]:
    """Return the attributes and globals that a function's code reads or sets."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def _copies(default_weight_loader: Any) -> bool:
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    default_weight_loader(parameter, torch.ones(2, dtype=torch.bfloat16))
    return parameter.tolist() == [1.0, 1.0]


def _makes_scales(set_default_quant_scales: Any) -> bool:
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    buffers = {"_q_scale", "_k_scale", "_v_scale", "_prob_scale"}
    floats = {f"{name}_float" for name in buffers}
    hosts = {"_k_scale_cpu", "_v_scale_cpu"}  # from vLLM 0.26 on
    found = {name for name in (*layer._buffers, *vars(layer)) if "scale" in name}
    return (
        found - hosts == buffers | floats  # a copy that is not known here would stay 1
        and all(getattr(layer, name).shape == () for name in found - floats)
        and all(isinstance(getattr(layer, name), float) for name in floats)
    )


def _makes_variants(subclass_attention_backend: Any) -> bool:
    class Backend:
        pass

    variant = subclass_attention_backend("Probe", Backend, dict)
    return issubclass(variant, Backend) and variant.get_builder_cls() is dict


def _names(implementation: str, builder: str) -> Callable[[Any], bool]:
    """Return a function that tells whether an attention backend names two classes of its module."""

    def named(backend: Any) -> bool:
        module = sys.modules[backend.__module__]
        found = backend.get_impl_cls(), backend.get_builder_cls()
        return found == (getattr(module, implementation), getattr(module, builder))

    return named


def _derives_known_parts(mla_attention: Any) -> bool:
    """Return whether what is kept of ``kv_b_proj`` is known, or refused by its setting's name."""
    code = inspect.unwrap(mla_attention.process_weights_after_loading).__code__
    texts = {text for text in code.co_consts if isinstance(text, str)}
    copies = {text for text in texts if text.startswith(("W_UK", "W_UV"))} - {"W_UK_T", "W_UV"}
    return not copies or (copies == {"W_UK_T_dcp_qrep"} and _has(mla_attention, "dcp_q_replicate"))


_LINEAR = "model_executor.layers.linear"
_MOE = "model_executor.layers.fused_moe"
_GEMM = "model_executor.kernels.linear"
_CPU_ATTN = "v1.attention.backends.cpu_attn"
_FLASH_ATTN = "v1.attention.backends.flash_attn"
_TRITON_ATTN = "v1.attention.backends.triton_attn"
_GPU_EXPERTS = "cuda experts"
_EXACT_EXPERTS = "exact experts"
_FUSION = "cuda compiled"
_ROTARY = "model_executor.layers.rotary_embedding.base"

# fmt: off
PROBES = (
    # Patches
    Probe(1, "v1.engine.core", "EngineCore", attributes="scheduler model_executor"),
    Probe(1, "v1.engine.core", "EngineCore.is_scheduler_paused", positional=1),
    Probe(1, "v1.core.sched.interface", "SchedulerInterface.has_unfinished_requests", positional=1),
    Probe(2, "model_executor.model_loader.default_loader", "DefaultModelLoader.get_all_weights",
        positional=3),
    Probe(3, "model_executor.models.utils", "AutoWeightsLoader._can_skip", positional=2),
    Probe(3, "model_executor.models.utils", "AutoWeightsLoader", attributes="module"),
    Probe(3, "model_executor.layers.utils", "cpu_unquantized_gemm", attributes="cpu_linear",
        needs="cpu"),
    Probe(3, "v1.attention.backend", "AttentionImpl.process_weights_after_loading", positional=2),
    Probe(3, "model_executor.layers.quantization.base_config",
        "QuantizeMethodBase.process_weights_after_loading", positional=2),
    Probe(4, "v1.engine.llm_engine", "LLMEngine.add_request", needs="client"),
    # Read or subclassed
    Probe(5, "v1.engine.core_client", "MPClient", attributes="resources utility_results",
        needs="client"),
    Probe(5, "v1.engine.core_client", "BackgroundResources", attributes="engine_dead",
        needs="client"),
    Probe(5, "v1.engine.llm_engine", "LLMEngine",
        attributes="engine_core model_executor output_processor abort_request", needs="client"),
    Probe(5, "v1.engine.async_llm", "AsyncLLM", attributes="errored dead_error vllm_config",
        needs="client"),
    Probe(5, "config", "ParallelConfig",
        attributes="data_parallel_size data_parallel_size_local data_parallel_external_lb "
        "data_parallel_hybrid_lb worker_extension_cls", needs="client"),
    Probe(5, "v1.engine.output_processor", "OutputProcessor", attributes="request_states",
        needs="client"),
    Probe(6, "v1.attention.backend", "AttentionMetadataBuilder.__init__", positional=5),
    Probe(6, "v1.attention.backend", "AttentionMetadataBuilder.build", positional=3),
    Probe(6, "v1.attention.backend", "subclass_attention_backend", positional=3,
        behaves=_makes_variants),
    Probe(6, "v1.worker.gpu_worker", "Worker",
        attributes="determine_available_memory compile_or_warm_up_model execute_dummy_batch"),
    Probe(7, "model_executor.layers.attention.attention", "set_default_quant_scales",
        behaves=_makes_scales),
    Probe(7, "model_executor.layers.attention", "Attention",
        attributes="impl layer_name kv_cache_dtype query_quant"),
    Probe(8, "config", "CompilationConfig", attributes="static_forward_context"),
    Probe(8, "forward_context", "ForwardContext", attributes="no_compile_layers"),
    Probe(9, "model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO", needs="sleep"),
    Probe(9, "device_allocator.sleep_mode_backend", "CuMemBackend.suspend", positional=2,
        needs="sleep"),
    Probe(9, "device_allocator.sleep_mode_backend", "CuMemBackend.resume", positional=2,
        needs="sleep"),
    Probe(10, "model_executor.parameter", "ModelWeightParameter",
        attributes="load_column_parallel_weight load_row_parallel_weight "
        "load_merged_column_weight load_qkv_weight"),
    Probe(10, _LINEAR, "QKVParallelLinear.weight_loader_v2", positional=4),
    Probe(10, _LINEAR, "MergedColumnParallelLinear.weight_loader_v2", positional=4),
    Probe(10, _LINEAR, "RowParallelLinear.weight_loader_v2", positional=3),
    Probe(10, _LINEAR, "ReplicatedLinear.weight_loader", positional=3),
    Probe(10, f"{_MOE}.routed_experts", "RoutedExperts.weight_loader", positional=3,
        keywords="weight_name shard_id expert_id return_success", needs="experts"),
    Probe(10, "model_executor.utils", "set_weight_attrs", positional=2),
    Probe(10, "model_executor.model_loader.weight_utils", "default_weight_loader", behaves=_copies),
    Probe(11, "model_executor.models.interfaces", "SupportsQuant",
        attributes="packed_modules_mapping"),
    Probe(11, _LINEAR, "QKVParallelLinear",
        attributes="total_num_heads total_num_kv_heads head_size"),
    Probe(11, _LINEAR, "MergedColumnParallelLinear", attributes="output_sizes"),
    Probe(11, _LINEAR, "LinearBase", attributes="input_size output_size quant_method"),
    Probe(11, "model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding",
        attributes="org_vocab_size shard_indices"),
    Probe(11, f"{_MOE}.routed_experts", "RoutedExperts",
        attributes="expert_map moe_config activation apply_router_weight_on_input "
        "global_num_experts", needs="experts"),
    Probe(11, f"{_MOE}.routed_experts", "RoutedExperts._expert_routing_tables", positional=1,
        needs="experts"),
    Probe(11, f"{_MOE}.routed_experts", "RoutedExperts._map_global_expert_id_to_local_expert_id",
        positional=2, needs="experts"),
    Probe(11, f"{_MOE}.runner.moe_runner", "MoERunner", attributes="gate", needs="experts"),
    Probe(11, "model_executor.layers.quantization.base_config",
        "QuantizationConfig.apply_vllm_mapper", positional=2),
    Probe(11, "model_executor.models.utils", "WeightsMapper._map_name", positional=2),
    Probe(11, "model_executor.models.utils", "WeightsMapper", attributes="orig_to_new_prefix"),
    Probe(11, "model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention",
        attributes="conv1d num_v_heads A_log dt_bias", needs="linear_attention"),
    Probe(11, "model_executor.layers.utils", "dispatch_cpu_unquantized_gemm",
        attributes="_cpu_unpacked_conv_weight", needs="linear_attention cpu"),
    Probe(11, "_custom_ops", "causal_conv1d_weight_pack", positional=1,
        needs="linear_attention cpu"),
    Probe(11, "model_executor.layers.attention", "MLAAttention",
        attributes="kv_b_proj num_heads kv_lora_rank qk_nope_head_dim layer_name kv_cache_dtype "
        "attn_backend process_weights_after_loading", behaves=_derives_known_parts, needs="mla"),
    Probe(11, "lora.layers.base_linear", "BaseLinearLayerWithLoRA", attributes="base_layer",
        needs="lora"),
    Probe(11, f"{_MOE}.config", "FusedMoEConfig",
        attributes="num_experts num_local_experts experts_per_token hidden_dim "
        "intermediate_size_per_partition_unpadded tp_rank tp_size activation "
        "has_bias is_lora_enabled moe_backend moe_parallel_config", needs="experts"),
    Probe(12, _GEMM, "DeepGemmFp8BlockScaledMMKernel", positional=1, needs="cuda"),
    # It takes any arguments, and looks for this one by its name.
    Probe(12, "utils.deep_gemm", "fp8_gemm_nt", needs="cuda",
        behaves=lambda multiply: "is_deep_gemm_e8m0_used" in multiply.__code__.co_consts),
    Probe(12, _GEMM, "CutlassFp8BlockScaledMMKernel.apply_block_scaled_mm", positional=1,
        keywords="A B As Bs", needs="cuda"),
    Probe(12, _GEMM, "TritonFp8BlockScaledMMKernel.apply_block_scaled_mm", positional=1,
        keywords="A B As Bs", needs="cuda"),
    Probe(12, _GEMM, "is_supported_and_can_implement_kernel", positional=3, needs="cuda"),
    Probe(12, f"{_GEMM}.scaled_mm.ScaledMMLinearKernel", "FP8ScaledMMLinearLayerConfig",
        positional=0,
        keywords="weight_quant_key activation_quant_key weight_shape input_dtype out_dtype",
        needs="cuda"),
    Probe(12, "model_executor.layers.quantization.utils.quant_utils",
        attributes="kFp8Dynamic128Sym kFp8Static128BlockSym", needs="cuda"),
    Probe(12, "config.kernel", "KernelConfig", attributes="linear_backend", needs="cuda"),
    Probe(12, "envs", attributes="VLLM_USE_DEEP_GEMM_E8M0", needs="cuda"),
    Probe(13, f"{_MOE}.oracle.fp8", "make_fp8_moe_kernel", positional=5, needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.oracle.fp8", "make_fp8_moe_quant_config", positional=1,
        keywords="w1_scale w2_scale a1_scale a2_scale block_shape", needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.oracle.fp8", "backend_to_kernel_cls", positional=1, needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.oracle.fp8", "Fp8MoeBackend", attributes="TRITON DEEPGEMM",
        needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.oracle.unquantized", "make_unquantized_moe_kernel", positional=5,
        needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.oracle.unquantized", "backend_to_kernel_cls", positional=1,
        needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.modular_kernel", "FusedMoEKernel.apply", positional=1,
        keywords="hidden_states w1 w2 topk_weights topk_ids activation "
        "apply_router_weight_on_input global_num_experts expert_map "
        "shared_experts shared_experts_input", needs="experts"),
    Probe(13, f"{_MOE}.modular_kernel", "FusedMoEKernel", attributes="fused_experts",
        needs="experts"),
    Probe(13, f"{_MOE}.experts.triton_deep_gemm_moe", "TritonOrDeepGemmExperts.is_supported_config",
        positional=5, needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.experts.triton_deep_gemm_moe",
        "TritonOrDeepGemmExperts._select_experts_impl", positional=4, needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.config", "FusedMoEParallelConfig", attributes="use_all2all_kernels",
        needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.experts.fallback", "FallbackExperts", attributes="fallback_experts",
        needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.deep_gemm_utils", "compute_aligned_M_and_alignment", positional=0,
        keywords="M num_topk local_num_experts alignment expert_tokens_meta", needs=_GPU_EXPERTS),
    Probe(13, "utils.deep_gemm", "is_deep_gemm_e8m0_used", positional=0, needs=_GPU_EXPERTS),
    Probe(13, f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase",
        attributes="is_monolithic apply_monolithic", needs=_EXACT_EXPERTS),
    Probe(13, f"{_MOE}.routed_experts", "RoutedExperts", attributes="top_k local_num_experts",
        needs=_EXACT_EXPERTS),
    Probe(13, f"{_MOE}.deep_gemm_utils", "deepgemm_moe_permute", positional=0,
        keywords="aq aq_scale topk_ids local_num_experts expert_map expert_tokens_meta aq_out",
        needs=_EXACT_EXPERTS),
    Probe(13, "utils.deep_gemm", "mk_alignment_scope", positional=1, needs=_EXACT_EXPERTS),
    Probe(13, "config", "ParallelConfig", attributes="enable_eplb", needs=_EXACT_EXPERTS),
    Probe(14, "v1.attention.backends.registry", "AttentionBackendEnum.clear_override",
        positional=1),
    Probe(14, _CPU_ATTN, "CPUAttentionBackend", needs="cpu",
        behaves=_names("CPUAttentionBackendImpl", "CPUAttentionMetadataBuilder")),
    Probe(14, _CPU_ATTN, "CPUAttentionBackend.get_supported_head_sizes", needs="cpu",
        behaves=lambda sizes: len(sizes()) > 0),  # the base class has none
    Probe(14, _CPU_ATTN, "CPUAttentionBackendImpl.__init__", positional=7,
        keywords="kv_cache_dtype", needs="cpu"),
    Probe(14, _CPU_ATTN, "CPUAttentionBackendImpl.forward", positional=10, needs="cpu"),
    Probe(14, _CPU_ATTN, "CPUAttentionBackendImpl.do_kv_cache_update", positional=6, needs="cpu"),
    Probe(14, _CPU_ATTN, "CPUAttentionBackendImpl",
        attributes="head_size num_kv_heads scale alibi_slopes sliding_window logits_soft_cap "
        "sinks attn_type", needs="cpu"),
    Probe(14, _CPU_ATTN, "CPUAttentionMetadata", attributes="query_start_loc seq_lens block_table",
        needs="cpu"),
    Probe(14, _CPU_ATTN, "CPUAttentionMetadataBuilder.__init__", positional=5, needs="cpu"),
    Probe(14, _FLASH_ATTN, "FlashAttentionBackend", needs="cuda",
        behaves=_names("FlashAttentionImpl", "FlashAttentionMetadataBuilder")),
    Probe(14, _FLASH_ATTN, "FlashAttentionImpl.forward", positional=10, needs="cuda"),
    Probe(14, _FLASH_ATTN, "FlashAttentionImpl",
        attributes="head_size num_heads num_kv_heads scale alibi_slopes sliding_window "
        "logits_soft_cap sinks attn_type kv_cache_dtype vllm_flash_attn_version "
        "dcp_world_size batch_invariant_enabled supports_quant_query_input", needs="cuda"),
    Probe(14, _FLASH_ATTN, "FlashAttentionMetadata",
        attributes="num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens "
        "block_table scheduler_metadata max_num_splits causal", needs="cuda"),
    Probe(14, _FLASH_ATTN, "FlashAttentionMetadataBuilder.get_cudagraph_support", positional=2,
        needs="cuda"),
    Probe(14, _FLASH_ATTN, "FlashAttentionMetadataBuilder.build", positional=4, needs="cuda"),
    Probe(14, "v1.attention.backend", "AttentionMetadataBuilder",
        attributes="vllm_config layer_names reorder_batch_threshold", needs="cuda"),
    Probe(14, "v1.attention.backend", "CommonAttentionMetadata",
        attributes="num_reqs query_start_loc query_start_loc_cpu seq_lens "
        "seq_lens_cpu_upper_bound", needs="cuda"),
    Probe(14, "config", "VllmConfig", attributes="speculative_config", needs="cuda"),
    Probe(14, "config", "CacheConfig", attributes="kv_sharing_fast_prefill", needs="cuda"),
    Probe(14, "v1.attention.backends.fa_utils", "flash_attn_varlen_func", positional=0,
        keywords="q k v out cu_seqlens_q max_seqlen_q cu_seqlens_k max_seqlen_k seqused_k "
        "softmax_scale causal block_table scheduler_metadata num_splits fa_version q_descale "
        "k_descale v_descale", needs="cuda"),
    Probe(14, "utils.torch_utils", "canonicalize_singleton_dim_strides", positional=1,
        needs="cuda"),
    Probe(14, "_custom_ops", "scaled_fp8_quant", positional=2, needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionBackend", needs="cuda",
        behaves=_names("TritonAttentionImpl", "TritonAttentionMetadataBuilder")),
    Probe(14, _TRITON_ATTN, "TritonAttentionBackend.supported_kv_cache_dtypes", needs="cuda",
        behaves=lambda dtypes: "int8_per_token_head" in dtypes),
    Probe(14, _TRITON_ATTN, "TritonAttentionImpl.forward", positional=10, needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionImpl.do_kv_cache_update", positional=6, needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionImpl",
        attributes="head_size num_kv_heads scale alibi_slopes sliding_window logits_soft_cap sinks "
        "attn_type kv_cache_dtype chunk_lookback dcp_world_size fused_output_quant_supported",
        needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionMetadata",
        attributes="max_query_len seq_lens block_table causal", needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionMetadataBuilder.get_cudagraph_support", positional=2,
        needs="cuda"),
    Probe(14, _TRITON_ATTN, "TritonAttentionMetadataBuilder.build", positional=4, needs="cuda"),
    Probe(14, "config", "ModelConfig",
        attributes="is_mm_prefix_lm rswa_window get_sliding_window get_head_size", needs="cuda"),
    Probe(14, "v1.attention.backends.fa_utils", "get_flash_attn_version", positional=0,
        keywords="head_size", needs="cuda"),
    Probe(15, "compilation.passes.vllm_inductor_pass", "VllmFusionPatternMatcherPass", positional=2,
        attributes="register uuid hash_source", needs=_FUSION),
    Probe(15, "compilation.passes.vllm_inductor_pass", "VllmPatternReplacement",
        attributes="pattern replacement get_inputs empty", needs=_FUSION),
    Probe(15, "compilation.passes.fusion.matcher_utils", "MatcherSiluAndMul", positional=0,
        needs=_FUSION),
    Probe(15, "ir.ops", attributes="rms_norm fused_add_rms_norm", needs=_FUSION),
    Probe(15, "model_executor.layers.activation", "SiluAndMul.forward_cuda", positional=2,
        needs="cuda"),
    Probe(15, _ROTARY, "RotaryEmbedding.__init__", positional=7, keywords="init_cache",
        needs="rotary"),
    Probe(15, _ROTARY, "RotaryEmbedding",
        attributes="head_size rotary_dim max_position_embeddings base is_neox_style "
        "forward_native forward_cpu forward_cuda _compute_cos_sin_cache", needs="rotary"),
    Probe(15, "model_executor.layers.rotary_embedding.yarn_scaling_rope",
        "YaRNScalingRotaryEmbedding", attributes="mscale", needs="rotary"),
    Probe(15, "_custom_ops", "rotary_embedding", positional=6, needs="cuda rotary"),
    Probe(15, "config", "PassConfig", attributes="enable_qk_norm_rope_fusion", needs="rotary"),
    Probe(15, "model_executor.layers.layernorm", "RMSNorm.__init__", positional=3,
        keywords="dtype", needs="exact"),
    Probe(15, "model_executor.layers.layernorm", "RMSNorm",
        attributes="hidden_size variance_epsilon weight forward_native forward_cuda",
        needs="exact"),
    Probe(15, f"{_ROTARY.rpartition('.')[0]}.llama3_rope", "Llama3RotaryEmbedding",
        attributes="scaling_factor low_freq_factor high_freq_factor orig_max_position",
        needs="exact"),
    Probe(15, "config", "VllmConfig", attributes="use_v2_model_runner", needs="exact"),
    Probe(15, "config", "ModelConfig",
        attributes="head_dtype is_multimodal_model logprobs_mode get_total_num_kv_heads",
        needs="exact"),
    Probe(15, "distributed", "tensor_model_parallel_all_reduce", positional=1, needs="exact"),
    Probe(15, "distributed", "tensor_model_parallel_all_gather", positional=1, keywords="dim",
        needs="exact"),
    Probe(15, "distributed", "get_tensor_model_parallel_rank", needs="exact"),
    Probe(15, "model_executor.layers.vocab_parallel_embedding",
        attributes="DEFAULT_VOCAB_PADDING_SIZE", needs="exact"),
    Probe(15, "v1.worker.gpu.sample.logprob", "compute_token_logprobs", positional=2,
        needs="exact"),
    # Small ones
    Probe(16, "distributed.weight_transfer.nccl_engine", "NCCLWeightTransferEngine", positional=4,
        needs="transfer"),
    Probe(16, "distributed.weight_transfer.nccl_engine", "NCCLWeightTransferUpdateInfo",
        positional=0, keywords="names shapes dtype_names", needs="transfer"),
    Probe(16, "v1.worker.gpu_worker", "Worker",
        attributes="start_weight_update update_weights finish_weight_update weight_transfer_engine",
        needs="transfer"),
    Probe(17, "distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.reset_cache",
        needs="transfer"),
    Probe(18, "v1.attention.selector", "get_attn_backend", positional=3,
        keywords="use_mla num_heads", needs="doctor"),
    Probe(18, "v1.attention.backends.fa_utils", "get_flash_attn_version", positional=0,
        keywords="head_size", needs="doctor"),
    # Imported late
    Probe(20, "model_executor.model_loader", "get_model_loader", positional=1),
    Probe(21, "distributed", "get_tp_group", positional=0),
    Probe(22, "v1.engine.exceptions", "EngineDeadError", positional=0, needs="client"),
    # Set on vLLM's objects
    Probe(23, "model_executor.layers.attention", "Attention.get_attn_backend",
        attributes="attn_backend"),
    Probe(28, "config", "CompilationConfig", attributes="inductor_compile_config backend"),
    Probe(29, "config", "VllmConfig", attributes="additional_config"),
    Probe(30, "config", "ModelConfig", attributes="sleep_mode_backend enable_sleep_mode"),
    Probe(31, "config", "ModelConfig", attributes="model model_weights revision"),
    Probe(33, "model_executor.layers.attention", "Attention",
        attributes="kv_cache_dtype kv_cache_torch_dtype", needs="cpu"),
)
# fmt: on
"""In the order of the rows. Where a row has no probe of its own, docs/upgrading.md says why."""
