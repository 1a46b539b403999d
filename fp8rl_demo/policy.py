"""The trainer: real Megatron-Core in one process, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fp8rl.recipe import Recipe
from fp8rl_demo.batch import TokenBatch
from fp8rl_demo.settings import Settings, hf_config

LossFn = Callable[[torch.Tensor, slice], torch.Tensor]
"""Takes logprobs ``[b, T]`` with gradient and their rows in the minibatch; returns their share of
the minibatch's loss."""


class MegatronPolicy:
    """A GPTModel with Megatron-Core's DDP and mixed-precision Adam, with FP8 linears by recipe.

    Args:
        recipe: ``training`` and ``pins`` decide which linear layers run in FP8, ``kv_cache``
            whether attention sees K and V as the rollout's cache holds them.
    """

    def __init__(self, settings: Settings, recipe: Recipe) -> None:
        from megatron_fp8rl import convert
        from megatron_fp8rl.kv.cache import KVCacheInTraining
        from megatron_fp8rl.kv.observers import QKVObserver
        from megatron_fp8rl.testing.cpu_shim import CpuShim
        from megatron_fp8rl.testing.local_spec import completed_local_spec

        gpu = torch.cuda.is_available()
        self._active = completed_local_spec if gpu else CpuShim().active
        self._device = torch.device("cuda" if gpu else "cpu")
        self._settings, self._exact = settings, recipe.exact
        with self._active():
            self.model, self._wrapped, self.optimizer = _build(settings, self._device, self._exact)
            self.conversion = convert(self.model, recipe)
            self.observer = QKVObserver([self.model])
            cache = recipe.kv_cache
            in_training = cache.in_training and cache.dtype != "auto"
            self._kv_cache = KVCacheInTraining([self.model], cache.dtype) if in_training else None

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Return logprobs of ``batch.tokens[:, 1:]``, float32 ``[B, T]``; q, k, v are observed."""
        size = self._settings.microbatch_size
        with self._active():
            parts = [
                self._token_logprobs(self._wrapped, batch.tokens[start : start + size])
                for start in range(0, len(batch), size)
            ]
        return torch.cat(parts)

    def step(self, batch: TokenBatch, loss_fn: LossFn, learning_rate: float) -> dict[str, float]:
        """Do one optimizer step over a minibatch, in micro-batches by Megatron-Core's schedule.

        The losses of the micro-batches are added: ``loss_fn`` divides by the whole minibatch.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size = self._settings.microbatch_size
        parts = [slice(i, min(i + size, len(batch))) for i in range(0, len(batch), size)]

        def forward_step(rows: Iterator[slice], model: torch.nn.Module) -> tuple[Any, Callable]:
            index = next(rows)
            logprobs = self._token_logprobs(model, batch.tokens[index])

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                share = loss_fn(output, index)
                # The schedule divides by the number of micro-batches; these losses are a sum.
                return share * len(parts), share.detach()

            return logprobs, loss

        with self._active():
            self._wrapped.zero_grad_buffer()  # type: ignore[operator]
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(parts),
                model=self._wrapped,
                num_microbatches=len(parts),
                seq_length=batch.tokens.shape[1] - 1,
                micro_batch_size=size,
                forward_only=False,
            )
            _, grad_norm, _ = self.optimizer.step()
        return {"loss": float(sum(losses)), "grad_norm": float(grad_norm)}

    def refitted(self, kv_scales: Mapping[str, torch.Tensor]) -> None:
        """Attend over K and V by the scales of the rollout that begins now."""
        if self._kv_cache is not None and self._kv_cache.has_scales:
            self._kv_cache.set(kv_scales)

    def clipped(self) -> dict[str, float]:
        """Return the shares of K and V that were clipped since the last call."""
        return self._kv_cache.metrics() if self._kv_cache is not None else {}

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters as HF-named BF16 tensors, as a refit takes them."""
        from megatron_fp8rl.export import export_hf

        with self._active():
            yield from export_hf([self.model])

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set the BF16 parameters from HF-named tensors, and the FP32 masters from those."""
        from megatron_fp8rl.export import load_hf

        with self._active():
            load_hf([self.model], tensors, allow_cast=True)
            self.optimizer.reload_model_params()
            self.conversion.invalidate()

    def optimizer_state(self) -> dict[str, Any]:
        """Return Megatron-Core's optimizer state: FP32 masters, Adam moments and step counts."""
        with self._active():
            return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Set masters and moments; :meth:`load` sets the BF16 parameters."""
        with self._active():
            self.optimizer.load_state_dict(state)

    def _token_logprobs(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logprobs of ``tokens[:, 1:]``, on the CPU, where the loss is computed."""
        tokens = tokens.to(self._device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
        logits = model(inputs, positions, None)  # local spec: the causal mask is the default
        if self._exact:
            from megatron.core import parallel_state

            from nemo_rl_ext.workers.logprobs import ExactLogprob

            group = parallel_state.get_tensor_model_parallel_group()
            return ExactLogprob.apply(logits, targets, 0, logits.shape[-1], 1024, group).cpu()
        found = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])
        return found.squeeze(-1).cpu()


def _build(
    settings: Settings, device: torch.device, exact: bool
) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads as finalize
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from megatron_fp8rl.testing.attention import UnroundedAttention
    from megatron_fp8rl.testing.cpu_shim import init_gloo
    from megatron_fp8rl.testing.models import build_gpt

    gpu = device.type == "cuda"
    if gpu:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    else:
        init_gloo()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(settings.seed)
    model = build_gpt(
        hf_config(settings),
        seed=settings.seed,
        core_attention=UnroundedAttention,
        use_cpu_initialization=not gpu,
        bias_activation_fusion=gpu or exact,
    ).to(device)
    config = model.config
    config.finalize_model_grads_func = finalize
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=Float16Module(config, model),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=0.0,
            adam_beta2=0.95,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=settings.clip_grad,
        ),
        [wrapped],
    )
    return model, wrapped, optimizer
