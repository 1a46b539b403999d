"""The DTensor worker's mixin, on a model of transformers and a base class like upstream's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from fp8rl.kv_scales import scale_names
from nemo_rl_ext.workers import kept_codes
from nemo_rl_ext.workers.dtensor_training import Fp8DTensorTraining
from nemo_rl_ext.workers.kept_codes import DeviceMemory
from support.hf import hf_model, ids
from support.nemo_rl import planned
from torch_fp8rl import export_hf
from torch_fp8rl.layers import Fp8Linear

Sent = dict[str, torch.Tensor]


class DTensorPolicyWorkerImpl:
    """Upstream's contract, as far as the mixin goes; the model has parameters in float32."""

    dp_size, rank = 4, 0

    def __init__(
        self, config: Any, tokenizer: Any = None, init_optimizer: bool = True, **options: Any
    ) -> None:
        self.cfg, self.forwards = config, 0
        self.model = hf_model("qwen3", dtype=torch.float32)

    def calibrate_qkv_fp8_scales(self, **options: Any) -> Any:
        raise NotImplementedError

    def get_logprobs(self, data: Any, micro_batch_size: int | None = None) -> torch.Tensor:
        self.forwards += 1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return self.model(data["input_ids"]).logits

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False) -> dict[str, Any]:
        for rows in data["input_ids"].split(1):
            with torch.autocast("cpu", torch.bfloat16):
                self.model(rows, labels=rows).loss.backward()
        return {"all_mb_metrics": {"loss": [0.5]}}

    def prepare_refit_info(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {name: (tensor.shape, torch.bfloat16) for name, tensor in state.items()}

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int = 0, kv_scales: dict[str, float] | None = None
    ) -> Sent:
        return self._sent(kv_scales)

    def _sent(self, kv_scales: dict[str, float] | None) -> Sent:
        if kv_scales is not None:
            raise NotImplementedError
        state = self.model.state_dict()
        return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, *, num_buffers: int | None = None
    ) -> Sent:
        return self._sent(kv_scales)


class Worker(Fp8DTensorTraining, DTensorPolicyWorkerImpl):
    pass


BATCH = {"input_ids": ids()}


def worker(init_optimizer: bool = True, **block: Any) -> Worker:
    policy = {"dtensor_cfg": {"fp8rl": block}, "generation": {"vllm_cfg": {"fp8rl": block}}}
    return Worker(planned(policy), init_optimizer=init_optimizer)


def converted(model: torch.nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, Fp8Linear)}


def test_a_model_that_trains_is_converted_but_for_pins_and_a_frozen_one_is_not() -> None:
    found = worker(pins={"layers": [1]})
    assert {name.split(".")[2] for name in converted(found.model)} == {"0"}
    assert len(converted(found.model)) == 7
    assert isinstance(found.model, Qwen3ForCausalLM)
    teacher = worker(init_optimizer=False)
    assert not converted(teacher.model)
    assert teacher._qkv_observer is teacher._kv_cache is teacher._kept_codes is None
    only_kv = worker(training=False)
    assert not converted(only_kv.model)
    assert only_kv._qkv_observer is not None and only_kv._kv_cache is not None


def test_a_refit_is_the_exports_tensors_and_all_kv_scales() -> None:
    found = worker()
    weights = dict(export_hf(found.model))
    info = found.prepare_refit_info()
    first = found.stream_weights_via_ipc_zmq()
    assert list(info) == list(first), "receivers take what was described, in its order"
    assert info == {name: (tensor.shape, tensor.dtype) for name, tensor in first.items()}
    assert set(first) == {*weights, "lm_head.weight", *scale_names(2)}
    assert all(torch.equal(first[name], weights[name]) for name in weights)
    assert {float(first[name]) for name in scale_names(2)} == {1.0}  # "not sent"
    scales = found.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"]
    sent = found.broadcast_weights_for_collective(kv_scales=scales)
    assert {name: float(sent[name]) for name in scale_names(2)} == scales
    assert set(found.model.state_dict()) == set(weights) | {"lm_head.weight"}, "a checkpoint's"


def test_no_scales_go_with_a_cache_that_needs_none() -> None:
    for dtype, rounded in (("auto", False), ("int8_per_token_head", True)):
        found = worker(kv_cache={"dtype": dtype})
        assert found._qkv_observer is None and (found._kv_cache is not None) == rounded
        assert not set(scale_names(2)) & {*found.prepare_refit_info()}
        assert not set(scale_names(2)) & {*found.stream_weights_via_ipc_zmq()}


def test_codes_are_kept_over_the_micro_batches_of_a_call_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Device(DeviceMemory):
        free = 1000 * 2**20

        def total(self) -> int:
            return 1000 * 2**20

        def available(self) -> int:
            return self.free

        def allocated(self) -> int:
            return 0

        peak = allocated

        def reset_peak(self) -> None: ...

    monkeypatch.setattr(kept_codes, "DeviceMemory", Device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        found = worker(kv_cache={"dtype": "auto"})
    # q, k, v, o and gate, up, down of two layers.
    sizes = 256 * 512 + 256 * 256, 3 * 256 * 256
    assert found._kept_codes is not None and found._kept_codes._weights == 2 * sum(sizes)
    epoch = found._kept_codes._keeping.__self__._epoch  # type: ignore[attr-defined]
    seen: list[bool] = []
    found.model.register_forward_hook(lambda *_: seen.append(epoch.keep))
    for _ in range(2):
        found.train(BATCH, loss_fn=None)
    assert seen == [False] * 2 + [True] * 2  # the first call shows what it needs
    Device.free = 0
    found.train(BATCH, loss_fn=None)
    assert seen[-2:] == [False] * 2
