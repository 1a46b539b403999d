"""Names by which vLLM asks for what this package registers."""

NAME = "fp8rl"
"""The quantization method: ``LLM(..., quantization="fp8rl")``."""

WEIGHT_TRANSFER_BACKENDS = {
    "fp8rl": "Fp8RLTransferEngine",
    "fp8rl_nccl": "Fp8RLNcclTransferEngine",
}
"""Values of vLLM's ``WeightTransferConfig(backend=...)`` and their classes in
:mod:`vllm_fp8rl.refit.weight_transfer`."""
