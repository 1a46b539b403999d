"""Checkpoints with and without the plugin, resumed runs, weights that are offloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

from fp8rl.numerics import quantize_block
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import Trainer, convert_alone, dense, losses, moe, tokens
from support.numeric import same_codes

pytestmark = pytest.mark.usefixtures("mcore")

CONFIGS = {"dense": dense(initializer_range=0.05), "experts": moe(3, initializer_range=0.05)}


def _loss(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    return losses(model, tokens(seed)).float().mean()


class Run(Trainer):
    """The distributed optimizer needs TransformerEngine to save its Adam."""

    def __init__(self, seed: int, *, fp8: bool) -> None:
        super().__init__(build_gpt(CONFIGS["dense"], seed=seed), fp8={} if fp8 else None)

    def sharded(self, *, loading: bool) -> dict[str, Any]:
        model = self.gpt.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading)
        return {"model": model, "optimizer": optimizer}


# ---- checkpoints


@pytest.mark.parametrize("saved_with", [True, False], ids=["from fp8", "from bf16"])
def test_state_dicts_load_with_and_without_the_plugin(saved_with):
    source, target = (build_gpt(CONFIGS["experts"], seed=seed) for seed in (1, 2))
    expected = _loss(source)
    keys = list(source.state_dict())
    convert_alone(source if saved_with else target)
    saved = source.state_dict()
    assert list(saved) == keys
    target.load_state_dict(saved)
    assert all(map(torch.equal, source.parameters(), target.parameters()))
    assert torch.equal(_loss(target if saved_with else source), expected)


@pytest.mark.slow  # megatron starts a process for the first checkpoint
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(True, True), (False, True), (True, False)],
    ids=["fp8", "from bf16 to fp8", "from fp8 to bf16"],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, saved, loaded):
    """In the other precision as the run that was saved, changed over."""
    straight = Run(seed=1, fp8=saved)
    first = [straight.step(tokens(i)) for i in range(2)]
    dist_checkpointing.save(straight.sharded(loading=False), str(tmp_path))
    if loaded and not saved:
        convert_alone(straight.ddp)
    elif saved and not loaded:
        straight.conversion.close()
    rest = [straight.step(tokens(i)) for i in range(2, 4)]
    resumed = Run(seed=2, fp8=loaded)
    resumed.step(tokens(7))  # codes of other weights, which must not survive
    state = dist_checkpointing.load(resumed.sharded(loading=True), str(tmp_path))
    resumed.gpt.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    assert [resumed.step(tokens(i)) for i in range(2, 4)] == rest
    assert rest[0] != first[0]


# ---- offload


@pytest.mark.parametrize("moment", ["eval", "train", "another dtype", "drop_codes"])
def test_weights_that_change_while_they_are_offloaded(moment):
    """Written through ``.data`` at the same address: nothing on the parameter tells, and old codes
    would be used but for the moment at which a framework does it."""
    gpt, other = (build_gpt(CONFIGS["experts"], seed=seed) for seed in (1, 2))
    conversion = convert_alone(gpt)
    convert_alone(other)
    with conversion.keeping_codes():
        _loss(gpt)
        for mine, theirs in zip(gpt.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        if moment == "eval":
            gpt.eval()
        elif moment == "train":
            gpt.eval()
            _loss(gpt)
            gpt.train()
        elif moment == "another dtype":
            gpt.float().bfloat16()
        else:
            conversion.drop_codes()
        assert torch.equal(_loss(gpt), _loss(other))


class _SeenAsOnCuda(TorchFunctionMode):
    """Every tensor says that it is on a GPU, but for copies on the host and what is made of them.

    megatron's HybridDeviceOptimizer offloads parameters of which ``is_cuda`` is true. Around the
    optimizer alone: kernels are chosen by the same attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not self._on_host(args[0])
        if func is torch.Tensor.pin_memory:  # vLLM, where it has been imported, has its own
            return args[0]
        out = func(*args, **(kwargs or {}))
        copies = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)
        if func is torch.Tensor.cpu or (func in copies and self._on_host(args[0])):
            self._host.append(out)
        return out

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return any(tensor is other for other in self._host)


class Offloaded(Trainer):
    """With the states of Adam, and Adam itself, on the CPU (``--optimizer-cpu-offload``)."""

    elsewhere = _SeenAsOnCuda()

    def make_optimizer(self, **options: Any) -> Any:
        options["use_precision_aware_optimizer"] = True  # megatron's arguments ask for it
        options |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
        options |= {"overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False}
        with self.elsewhere:
            return super().make_optimizer(**options)

    def update(self) -> float:
        with self.elsewhere:
            return super().update()


def test_steps_of_an_offloaded_optimizer_reach_the_codes(monkeypatch):
    """Naively codes follow address or ``_version``, which Adam of the CPU does not change."""
    # Without TransformerEngine megatron-core cannot compare its version, for an option of its own.
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda *args, **kwargs: False)
    run = Offloaded(build_gpt(CONFIGS["dense"], seed=1), fp8={}, distributed=True)
    (hybrid,) = [each.optimizer for each in run.optimizer.chained_optimizers]
    assert isinstance(hybrid, HybridDeviceOptimizer)
    assert len(hybrid.gpu_params_map_cpu_copy) == len(hybrid.cpu_optimizers) > 0
    modules: list[Any] = list(run.conversion.modules.values())

    def trace() -> list[tuple[int, int]]:
        return [(module.weight.data_ptr(), module.weight._version) for module in modules]

    naive, before = [quantize_block(module.weight.detach()) for module in modules], trace()
    with run.conversion.keeping_codes():
        for _ in range(2):
            run.step(tokens())
            assert trace() == before
            _loss(run.ddp)  # the forward after the step makes the codes
            for module, old in zip(modules, naive, strict=True):
                expected = quantize_block(module.weight.detach())
                assert same_codes(module.fp8_state.codes.rowwise(module.weight), expected)
                assert not torch.equal(old.scale_inv, expected.scale_inv)
