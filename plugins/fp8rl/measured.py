"""Measured speed of the kernels of rollout and training: the table behind ``fp8rl estimate``.

Every number names its file in ``benchmarks/results/``, and ``tests/fp8rl/test_estimate.py``
computes it from that file again. Beside a GPU's own entry all of them are of one H100, most of
Qwen3-8B's shapes. None is of a whole rollout or of a whole model's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8rl.recipe import KVDtype

Precision = Literal["bf16", "fp8"]
Product = Literal["fprop", "dgrad", "wgrad"]
Phase = Literal["log-probabilities", "forward and backward"]
Engine = Literal["bf16", "stock", "fp8rl"]


@dataclass(frozen=True)
class GPU:
    """What is known of one GPU."""

    name: str
    memory: int
    """GiB that CUDA reports, rounded down."""
    copy: float
    """Bytes per second, read and written, of a copy (``quantize_h100.json``,
    ``quantize_h200.json``)."""
    extrapolated: str = ""
    """What is taken from another GPU; empty: nothing."""


GPUS = {
    "h100": GPU("H100", 79, 3.003e12),
    "h200": GPU(
        "H200",
        139,
        4.244e12,
        "an H200 counts as an H100 whose memory is faster by the ratio of measured copies",
    ),
}

MEASURED_HIDDEN = 4096
"""Hidden size of Qwen3-8B."""
MEASURED_LINEARS = {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)}
"""Outputs and inputs of the linear layers of Qwen3-8B."""
MEASURED_LENGTH = 6024
"""Tokens of the longest requests in a rollout that the estimate was compared with."""
FLOPS: dict[Precision, dict[Product, float]] = {
    "bf16": {"fprop": 747e12, "dgrad": 735e12, "wgrad": 642e12},
    "fp8": {"fprop": 1215e12, "dgrad": 1208e12, "wgrad": 873e12},
}
"""FLOP/s of products over 8,192 tokens; FP8 is DeepGEMM, and wgrad adds to a float32 gradient
(``megatron_linears_h100.json``)."""
QUANTIZE = 0.853
"""Share of a copy's bandwidth at which operands and weights are quantized on both sides
(``megatron_linears_h100.json``)."""
EXPERTS: dict[int, dict[Precision, float]] = {
    512: {"bf16": 1.39, "fp8": 1.39},
    4096: {"bf16": 1.11, "fp8": 1.06},
}
"""By tokens of an expert: how many times longer than their roofline grouped experts take in
training, forward and backward; in FP8 weights are quantized in each direction
(``megatron_experts_2_h100.json``)."""
PERMUTATION_BYTES_MOVED: dict[Phase, float] = {
    "log-probabilities": 16.3,
    "forward and backward": 29.2,
}
"""Megatron's time to sort tokens by expert and back, in a layer with experts, as bytes at a copy's
bandwidth for one number of a token's hidden state and one of its experts: in a profile of four
layers of Qwen3-30B-A3B with 32 experts (``trainer_moe_h200.json``)."""
ROUTING_WAIT: dict[Precision, dict[Phase, float]] = {
    "bf16": {"log-probabilities": 4.8e-3, "forward and backward": 7.4e-3},
    "fp8": {"log-probabilities": 2.6e-3, "forward and backward": 8.9e-3},
}
"""Seconds that the GPU waits for the host in a layer with experts of a micro-batch: there Megatron
waits for the number of tokens of each expert before it launches what follows. What the GPU does not
work of the same calls, one host with 16 cores (``trainer_moe_h200.json``)."""
ALL_TO_ALL = 284e9
"""Bytes per second that a GPU sends to the others of a host with the tokens of their experts: what
is left of fp8rl's training of 12 layers of Qwen3-30B-A3B on four H200s, the one phase that this was
fitted to (``nemo_rl_real_30b_a3b_12l_2_h200.json``). The other phases of the run would give 84 to
151 GB/s: waits of the GPUs for each other may be in them."""
ROLLOUT_EXPERTS: dict[Precision, float] = {"bf16": 1.37, "fp8": 1.84}
"""The same in rollouts: the factors of an earlier training (``megatron_experts_h100.json``). vLLM's
experts themselves are quicker (1.23 in FP8) and its attention over few KV heads is slower than
:data:`DECODE` says (0.59 for 0.918; both ``rollout_30b_2_h200.json``). The factors were kept, since
rollouts of Qwen3-30B-A3B come out within 7% with them at 256 requests (13% too slow at 64)."""
ATTENTION_FLOPS = 343e12
"""FLOP/s of causal attention: what is left of a layer in BF16, forward and backward, without its
linear layers and elementwise kernels (``restructuring.json``, ``megatron_linears_h100.json``)."""
ADAM_BYTES_MOVED = 57.9
"""The optimizer's time for one parameter, as bytes at a copy's bandwidth: that part of a step of
Qwen3-1.7B (``megatron_step_h100.json``)."""
LOSS_BYTES_MOVED = 119.6
"""NeMo RL's time for a logit from the output layer to the loss and back, as bytes at a copy's
bandwidth: in a profile of Qwen3-4B (``trainer_4b_h200.json``)."""
CHUNKED_LOSS_BYTES_MOVED: dict[Phase, float] = {
    "log-probabilities": 55.1,
    "forward and backward": 178.7,
}
"""The same with ``policy.logprob_chunk_size``: what eight layers of Qwen3-8B take longer with it
than with fp8rl's one pass over the logits, whose own bytes :mod:`fp8rl.estimate` counts
(``trainer_8_layers_h200.json``)."""
ENGINE_BYTES = 1.5e9
"""Memory that vLLM keeps for activations and CUDA graphs, beside weights and cache
(``start_h200.json``)."""


@dataclass(frozen=True)
class Decode:
    """What a decode step of vLLM takes beside its products (``decode_profile_h100.json``)."""

    layer: float
    """Seconds of a layer's small kernels with :data:`PROFILED_REQUESTS`: norms, SiLU, quantization,
    rotary embedding, cache write."""


DECODE: dict[Engine, Decode] = {
    "bf16": Decode(21.1e-6),
    "stock": Decode(61.0e-6),
    "fp8rl": Decode(29.5e-6),
}
ATTENTION: dict[tuple[Engine, KVDtype], float] = {
    ("bf16", "auto"): 0.914,
    ("stock", "fp8_e4m3"): 0.659,
    ("fp8rl", "fp8_e4m3"): 0.918,
    ("stock", "int8_per_token_head"): 0.144,
    ("fp8rl", "int8_per_token_head"): 0.870,
}
"""Share of a copy's bandwidth at which attention reads the KV cache (same profile). Over INT8, of
which there is no profile: vLLM's kernel by itself with a cold cache (``decode_kernels_h200.json``);
fp8rl's from all that rollouts of Qwen3-8B take longer with it than over FP8, the host's part and
the cache's write too (``rollout_8b_int8_h200.json``)."""
PROFILED_REQUESTS = 256
SAMPLER_BYTES_MOVED = 28.6
"""The sampler's time for a logit, as bytes at a copy's bandwidth (``decode_profile_h100.json``)."""
HOST_LAYER: dict[Phase, float] = {"log-probabilities": 3.66e-3, "forward and backward": 9.63e-3}
"""Seconds of a phase for one layer of a micro-batch, dense, in FP8 and with TransformerEngine's
spec, in NeMo RL's worker, where the GPU waited for the host (``nemo_rl_real_4b_h200.json``). They
contain the head, the loss and what the worker adds to a call, and are from before SwiGLU was fused
there: an upper bound of the host's time."""
