"""Norm, rotation and the checks of an engine that computes exactly what the trainer does.

The modules are put in by :mod:`vllm_fp8rl.kernels.replaced_modules`. Their kernels are custom
operations, which torch.compile neither splits nor fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    DEFAULT_VOCAB_PADDING_SIZE,
    pad_vocab_size,
)
from vllm.platforms import current_platform

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import (
    EXACT_MODELS,
    REMEDY,
    head,
    implementation,
    reference,
    require_fp8_linears,
    require_served_ranks,
)
from fp8rl.kernels.rotary_table import LLAMA3, cos_sin_table, inverse_frequencies
from fp8rl.models.pins import PinPolicy
from vllm_fp8rl.kernels.rounding import Float32Rotary, kept_reason, swiglu_on_gpu


@torch.library.custom_op("fp8rl::exact_norm", mutates_args=(), device_types=("cuda", "cpu"))
def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalize rows; see :func:`fp8rl.kernels.norm.rms_norm`."""
    return implementation(x, "norm").rms_norm(x, weight, epsilon)


@_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x.new_empty(x.shape)  # contiguous, like the kernel's


@torch.library.custom_op("fp8rl::exact_add_norm", mutates_args=(), device_types=("cuda", "cpu"))
def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize sums of rows; see :func:`fp8rl.kernels.norm.add_rms_norm`."""
    return implementation(x, "norm").add_rms_norm(x, residual, weight, epsilon)


@_add_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("fp8rl::exact_rotate", mutates_args=(), device_types=("cuda", "cpu"))
def _rotate(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate ``[tokens, heads * head_size]``; see :func:`fp8rl.kernels.rotary.rotate`."""
    return _rotated(query, key, positions, table)


@_rotate.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


@torch.library.custom_op("fp8rl::exact_norm_rotate", mutates_args=(), device_types="cuda")
def _norm_rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    epsilon: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize and rotate heads, to which the fusion pass joins two norms and a rotation."""
    return _rotated(query, key, positions, table, (query_weight, key_weight, epsilon))


@_norm_rotate.register_fake
def _(query: torch.Tensor, key: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = (x.unflatten(-1, (-1, table.shape[1])) for x in (query, key))
    rotate = implementation(query, "rotary").rotate
    query, key = rotate(query, key, positions, table, norms=norms)
    return query.flatten(-2), key.flatten(-2)


@torch.library.custom_op("fp8rl::exact_swiglu", mutates_args=(), device_types=("cuda", "cpu"))
def _swiglu(x: torch.Tensor) -> torch.Tensor:
    """Multiply gate and up in float32, rounded once; the fusion pass joins the quantization."""
    return reference.swiglu(x) if x.is_cpu else swiglu_on_gpu(x)


@_swiglu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


class ExactRMSNorm(RMSNorm):
    """RMS norm by the kernel that the trainer calls too, over the weight of a module of vLLM."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__(norm.hidden_size, norm.variance_epsilon, dtype=norm.weight.dtype)
        self.weight = norm.weight

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x`` ``[.., hidden]``; with a residual also the sum of both."""
        weight, epsilon = self.weight.data, self.variance_epsilon
        if residual is None:
            return torch.ops.fp8rl.exact_norm(x, weight, epsilon)
        return torch.ops.fp8rl.exact_add_norm(x, residual, weight, epsilon)

    forward_cuda = forward_native


class ExactRotary(Float32Rotary):
    """Rotation by the table and the kernel that the trainer uses too.

    Args:
        rope: module of vLLM in whose place it comes; :func:`unserved_rotation` of it is None.
    """

    def __init__(self, rope: RotaryEmbedding) -> None:
        super().__init__(rope)
        factor = rope.scaling_factor if isinstance(rope, Llama3RotaryEmbedding) else None
        table = cos_sin_table(
            inverse_frequencies(float(rope.base), rope.rotary_dim, factor),
            rope.max_position_embeddings,
            torch.device(current_platform.device_type),
        )
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate ``[tokens, heads * head_size]``."""
        assert key is not None  # no model that is served shares keys between layers
        return torch.ops.fp8rl.exact_rotate(query, key, positions.flatten(), self.cos_sin_cache)

    forward_cuda = forward_native


class ExactSiluAndMul(SiluAndMul):
    """SwiGLU as the trainer computes it before its quantization."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[.., K]`` for gate and up side by side in ``[.., 2 K]``."""
        return torch.ops.fp8rl.exact_swiglu(x)

    forward_cuda = forward_cpu = forward_native


def unserved_rotation(rope: Any, engine: VllmConfig) -> str | None:
    """Return why :class:`ExactRotary` is not the same function as a module of vLLM, or None."""
    if reason := kept_reason(rope, engine):
        return reason
    if type(rope) not in (RotaryEmbedding, Llama3RotaryEmbedding):
        return f"vLLM's {type(rope).__name__} scales frequencies"
    if isinstance(rope, Llama3RotaryEmbedding):
        numbers = (rope.low_freq_factor, rope.high_freq_factor, rope.orig_max_position)
        if numbers != LLAMA3:
            return f"its rope_scaling has {numbers} where Megatron-Core has {LLAMA3}"
    if rope.rotary_dim != rope.head_size or not rope.is_neox_style:
        return "only halves of whole heads are rotated against each other"
    return None


def check_exact(engine: VllmConfig, policy: PinPolicy) -> None:
    """Raise UnsupportedError if an engine has a place whose bits depend on the batch."""
    model, parallel = engine.model_config, engine.parallel_config
    on_cpu = engine.device_config.device_type == "cpu"
    capability = current_platform.get_device_capability()
    draft, context = engine.speculative_config, parallel.decode_context_parallel_size
    needed = [
        ("dtype", model.dtype, torch.bfloat16, "set it to bfloat16"),
        ("logprobs_mode", model.logprobs_mode, "raw_logprobs", "leave it unset"),
        ("head_dtype", model.head_dtype, torch.bfloat16, "leave it out of hf_overrides"),
        ("is_multimodal_model", model.is_multimodal_model, False, "choose a model of text alone"),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1, "set it to 1"),
        ("decode_context_parallel_size", context, 1, "set it to 1"),
        ("speculative_config", draft and draft.method, None, "leave it unset"),
        ("enable_lora", engine.lora_config is not None, False, "leave it unset"),
        ("sliding_window", model.get_sliding_window(), None, "choose another model"),
        ("linear_backend", engine.kernel_config.linear_backend, "auto", "leave it unset"),
    ]
    if not on_cpu:
        card, second = tuple(capability or ()), engine.use_v2_model_runner
        needed += [
            ("a GPU of compute capability", card, (9, 0), "use a Hopper GPU"),
            ("VLLM_USE_V2_MODEL_RUNNER", second, True, "set it to 1 in the environment"),
        ]
    _require(needed, "in the rollout engine")
    if model.hf_text_config.model_type not in EXACT_MODELS:
        raise UnsupportedError(
            f"exact serves model_type {', '.join(EXACT_MODELS)}, not "
            f"'{model.hf_text_config.model_type}'; choose another model, {REMEDY}"
        )
    require_fp8_linears(policy)
    require_served_ranks("tensor_parallel_size", parallel.tensor_parallel_size)
    if parallel.tensor_parallel_size > 1:
        _check_ranks(engine)
    if not on_cpu:
        _check_kernels(engine)


def _require(needed: list[tuple[str, Any, Any, str]], where: str) -> None:
    """Refuse the first wrong setting, of each its name, value, needed value and remedy."""
    for what, value, good, remedy in needed:
        if value != good:
            raise UnsupportedError(
                f"exact needs {what} {good!r} {where}, not {value!r}; {remedy}, {REMEDY}"
            )


def _check_ranks(engine: VllmConfig) -> None:
    """Refuse a model whose parts on several ranks are not those of the trainer."""
    model, ranks = engine.model_config, engine.parallel_config.tensor_parallel_size
    for what, count, unit in (
        ("num_key_value_heads", model.get_total_num_kv_heads(), ranks),
        ("vocab_size", model.get_vocab_size(), DEFAULT_VOCAB_PADDING_SIZE),  # vLLM pads others
    ):
        if count % unit:
            raise UnsupportedError(
                f"exact with tensor_parallel_size {ranks} needs a multiple of {unit} as {what}, "
                f"not {count}, because vLLM's ranks hold other parts than the trainer's; set "
                f"tensor_parallel_size to 1 in both engines, {REMEDY}"
            )


def check_sums(engine: VllmConfig) -> None:
    """Refuse an all-reduce that rounds the sum of two parts in another way than once.

    All ranks call this. vLLM chooses among several by the size of a tensor, so that three sizes are
    compared. NCCL, of which Megatron's is, adds two bfloat16 numbers in one rounding
    (``src/device/reduce_kernel.h``); so do vLLM's own (``csrc/custom_all_reduce.cuh``) and torch's
    symmetric memory (``CUDASymmetricMemory-inl.h``).
    """
    if engine.parallel_config.tensor_parallel_size == 1:
        return
    device = torch.device(current_platform.device_type)
    make = torch.Generator(device).manual_seed(get_tensor_model_parallel_rank())
    hidden = engine.model_config.get_hidden_size()
    for rows in (1, 256, engine.scheduler_config.max_num_batched_tokens):
        own = torch.randn(rows, hidden, device=device, generator=make).bfloat16()
        one, other = tensor_model_parallel_all_gather(own[None], dim=0).float()
        if not torch.equal(tensor_model_parallel_all_reduce(own), (one + other).bfloat16()):
            raise UnsupportedError(
                "exact needs an all-reduce that adds the parts of two ranks in one rounding, and "
                f"vLLM's does not for bfloat16 [{rows}, {hidden}]; set "
                "disable_custom_all_reduce=True and the variables VLLM_ALLREDUCE_USE_SYMM_MEM and "
                f"VLLM_ALLREDUCE_USE_FLASHINFER to 0, which leaves NCCL's, {REMEDY}"
            )


def check_experts(engine: VllmConfig) -> None:
    """Raise UnsupportedError if the result of an engine's experts would not be the trainer's."""
    config, parallel = engine.model_config.hf_text_config, engine.parallel_config
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    backend, device = engine.kernel_config.moe_backend, engine.device_config.device_type
    needed = [
        ("device_type", device, "cuda", "use a Hopper GPU"),
        ("norm_topk_prob", config.norm_topk_prob, True, "choose another model"),
        ("shared_expert_intermediate_size", shared, 0, "choose another model"),
        ("tensor_parallel_size", parallel.tensor_parallel_size, 1, "set it to 1"),
        ("data_parallel_size", parallel.data_parallel_size, 1, "set it to 1"),
        ("enable_expert_parallel", parallel.enable_expert_parallel, False, "leave it unset"),
        ("enable_eplb", parallel.enable_eplb, False, "leave it unset"),
        ("moe_backend", backend, "auto", "leave it unset"),
    ]
    _require(needed, "of a rollout engine with experts")


def _check_kernels(engine: VllmConfig) -> None:
    """Refuse what the kernels of a GPU do not serve."""
    from fp8rl.kernels.attention import HEAD_SIZES  # needs Triton

    model = engine.model_config
    if model.get_head_size() not in HEAD_SIZES:
        raise UnsupportedError(
            f"exact serves heads of {HEAD_SIZES}, not of {model.get_head_size()}; choose another "
            f"model, {REMEDY}"
        )
    _check_head(
        model.get_vocab_size(),
        model.get_hidden_size(),
        engine.scheduler_config.max_num_seqs,
        ranks=engine.parallel_config.tensor_parallel_size,
    )
    _check_logprobs()


def _check_head(
    vocabulary: int, hidden: int, most: int, *, ranks: int = 1, device: str = "cuda"
) -> None:
    """Refuse an output projection by which a batch of up to ``most`` rows has its own sums.

    The trainer multiplies :data:`fp8rl.kernels.head.ROWS` rows at a time, by a weight without the
    rows with which vLLM pads the vocabulary. With few words an engine does so too.
    """
    words = vocabulary // ranks  # of a rank
    if words <= head.FEW_WORDS:
        return
    make = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": make}
    rows = torch.randn(max(most, head.ROWS), hidden, **options)
    weight = torch.randn(pad_vocab_size(vocabulary) // ranks, hidden, **options)
    trainers = head.multiply(rows[: head.ROWS], weight[:words].t())
    for count in range(1, most + 1):
        found = torch.nn.functional.linear(rows[:count], weight)[: head.ROWS, :words]
        if not torch.equal(found, trainers[:count]):
            raise UnsupportedError(
                f"exact needs an output projection whose results do not depend on the number of "
                f"rows, and cuBLAS multiplies {count} rows with [{words}, {hidden}] in another "
                f"order than {head.ROWS}; choose another model, {REMEDY}"
            )


def _check_logprobs() -> None:
    """Refuse a vLLM whose sampler adds in another order than the trainer."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from fp8rl.kernels.logprobs import token_logprobs

    make = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(8, 50_000, device="cuda", generator=make).bfloat16()  # as the sampler's
    ids = torch.arange(8, device="cuda")
    if not torch.equal(
        compute_token_logprobs(logits, ids[:, None])[:, 0], token_logprobs(logits, ids)[0]
    ):
        raise UnsupportedError(
            "vLLM's sampler computes log-probabilities in another order than "
            f"fp8rl.kernels.logprobs; use a vLLM that docs/versions.md names, {REMEDY}"
        )
