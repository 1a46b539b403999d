"""The Megatron worker's mixin, on a real GPTModel and a base class shaped like upstream's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.kv_scales import scale_names
from megatron_fp8rl.conversion import conversion_of
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.testing.models import build_gpt
from nemo_rl_ext.workers import kept_codes, training
from nemo_rl_ext.workers.kept_codes import DeviceMemory
from nemo_rl_ext.workers.training import Fp8Training
from support.megatron import LENGTH, dense, losses, moe, one_process, quantized_weights, tokens
from support.megatron import kept as kept_of
from support.nemo_rl import planned

CONFIG = dense(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.fixture(scope="module", autouse=True)
def megatron_world() -> Iterator[None]:
    with one_process() as shim, shim.active():
        yield


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, CONFIG.vocab_size, (4, 16), generator=generator)}


BATCH = batch(0)


def forward(model: torch.nn.Module, seed: int) -> torch.Tensor:
    return model(batch(seed)["input_ids"], torch.arange(16).expand(4, -1), None)


def upstream_setup(
    policy_cfg: Any,
    megatron_cfg: Any,
    load_optimizer: bool = True,
    additional_pre_wrap_hooks: Any = None,
    load_weights: bool = True,
) -> Any:
    """Upstream's contract: hooks take and give a list of chunks before they are wrapped."""
    chunks = [build_gpt(CONFIG, dtype=torch.float32)]
    for hook in additional_pre_wrap_hooks or ():
        chunks = hook(chunks)
    return SimpleNamespace(model=chunks[0])


# The module of upstream's class, whose function its constructor calls.
upstream = SimpleNamespace(setup_model_and_optimizer=upstream_setup)


class MegatronPolicyWorkerImpl:
    """Calls of upstream's kinds over batches, in two micro-batches each."""

    def __init__(
        self,
        config: dict[str, Any],
        init_optimizer: bool = True,
        weights_path: str | None = None,
        **options: Any,
    ) -> None:
        self.cfg, self.forwards = config, 0
        setup = upstream.setup_model_and_optimizer
        self.model = setup(config, None, init_optimizer, load_weights=True, **options).model

    def calibrate_qkv_fp8_scales(self, *, data: Any, include_q: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def micro_batches(self, data: dict[str, torch.Tensor], grad: bool = True) -> list[torch.Tensor]:
        found = []
        with torch.set_grad_enabled(grad):
            for ids in data["input_ids"].chunk(2):
                logits = self.model(ids, torch.arange(ids.shape[1]).expand(len(ids), -1), None)
                if grad:
                    logits.float().pow(2).mean().backward()
                found.append(logits.detach())
        return found

    def get_logprobs(
        self, *, data: Any, micro_batch_size: int | None = None, require_router_replay: bool = True
    ) -> list[torch.Tensor]:
        self.forwards += 1
        self.model.eval()
        return self.micro_batches(data, grad=False)

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int = 0, kv_scales: dict[str, float] | None = None
    ) -> tuple[int, Any]:
        return buffer_size_bytes, kv_scales

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, *, num_buffers: int | None = None
    ) -> tuple[int | None, Any]:
        return num_buffers, kv_scales

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, **options: Any
    ) -> None:
        Path(weights_path).mkdir()

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False) -> dict[str, Any]:
        self.model.train(not eval_mode)
        logits = self.micro_batches(data, grad=not eval_mode)
        if not eval_mode:
            torch.optim.SGD(self.model.parameters(), lr=1e-2).step()
            logits += self.micro_batches(data)
        return {"all_mb_metrics": {"loss": [0.5]}, "logits": logits}

    def train_microbatch(self, data: Any) -> None:
        self.micro_batches(data)
        self._log_gpu_mem("chunk_exit")

    def _log_gpu_mem(self, tag: str) -> None: ...

    def finish_train_step(self) -> dict[str, Any]:
        return {"all_mb_metrics": {}}


def policy(block: dict[str, Any], driver: str = "grpo", **trainer: Any) -> dict[str, Any]:
    """What a driver's worker gets; ``trainer``: keys of ``megatron_cfg`` in place of the block."""
    megatron = {"enabled": True, "defer_fp32_logits": True, **(trainer or {"fp8rl": block})}
    section = {"megatron_cfg": megatron, "generation": {"vllm_cfg": {"fp8rl": block}}}
    return planned({**section, "logprob_chunk_size": 1024}, driver)


class Worker(Fp8Training, MegatronPolicyWorkerImpl):
    upstream_module = upstream


def test_the_model_is_converted_and_pinned_before_it_is_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Bridge's registry of classes is for its export; Bridge needs Transformer Engine to import.
    monkeypatch.setattr("megatron_fp8rl.compat.register_with_bridge", lambda classes: None)
    block = {"pins": {"layers": [1]}, "kv_cache": {"dtype": "auto"}}
    order: list[int] = []

    def theirs(chunks: list[Any]) -> list[Any]:
        order.append(sum("Fp8" in type(m).__name__ for m in chunks[0].modules()))
        return chunks

    worker = Worker(policy(block), additional_pre_wrap_hooks=[theirs])
    assert order == [0]  # ours is the last, after adapters and draft models
    names = set(conversion_of(worker.model).modules)
    assert {n.split(".")[2] for n in names} == {"0", "2"}
    assert upstream.setup_model_and_optimizer is upstream_setup, "other workers' is as it was"


def test_every_model_is_built_without_the_norm_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of them the norm would make it another model than the rollout, untold."""
    resolver = SimpleNamespace(choose="stock")
    monkeypatch.setattr("megatron_fp8rl.compat.query_norm_patch", lambda: (resolver, "choose", "o"))
    built: list[str] = []

    def construct(self: Any, config: Any) -> None:  # imports, the model, the reference
        built.append(resolver.choose)

    monkeypatch.setattr(MegatronPolicyWorkerImpl, "__init__", construct)
    Worker(policy({}))
    assert (built, resolver.choose) == (["o"], "stock")


def test_workers_that_train_in_bf16_keep_the_model_and_rollouts_alone_have_it_observed() -> None:
    """A frozen teacher (`on_policy_distillation`) has a copy of the policy's section."""
    plain: dict[str, Any] = {"training": False}
    own = plain | {"kv_cache": {"in_training": False}}
    for worker, observed, cache in (
        (Worker(policy(plain)), True, True),
        (Worker(policy(own)), True, False),
        (Worker(policy({}), init_optimizer=False), False, False),
        (Worker(policy(plain, "ppo")), False, False),  # each engine has scales of its own
    ):
        assert not any("Fp8" in type(m).__name__ for m in worker.model.modules())
        assert isinstance(worker._qkv_observer, QKVObserver) == observed
        assert (worker._kv_cache is not None) == cache


def test_scales_come_from_the_steps_forwards_and_change_with_them() -> None:
    worker = Worker(policy({"training": False, "kv_cache": {"margin": 2.0}}))
    model = worker.model
    first = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"]
    assert worker.forwards == 1  # nothing had been seen
    assert set(first) == set(scale_names(3))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    forward(model, 1)
    second = worker.calibrate_qkv_fp8_scales(data=BATCH)["layers"]
    assert worker.forwards == 1
    assert set(second) == {n for n in scale_names(3) if not n.endswith("q_scale")}
    assert all(second[n] != first[n] for n in second)

    truth = QKVObserver(model)
    forward(model, 1)
    expected = truth.scales(2.0)
    truth.close()
    assert second == {n: float(expected[n]) for n in second}


def test_attention_sees_what_the_rollouts_cache_holds_from_each_refit_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(policy({"training": False}))
    plain = forward(worker.model, 1)
    first = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"]
    assert torch.equal(forward(worker.model, 1), plain), "scales that no engine has yet"
    assert worker.stream_weights_via_ipc_zmq(buffer_size_bytes=7, kv_scales=first) == (7, first)
    quantized = forward(worker.model, 1)
    assert not torch.equal(quantized, plain)

    second = worker.calibrate_qkv_fp8_scales(data=BATCH)["layers"]
    assert second != first
    assert torch.equal(forward(worker.model, 1), quantized), "those of the next refit do not count"
    small = {name: scale / 4 for name, scale in first.items()}
    assert worker.broadcast_weights_for_collective(kv_scales=small, num_buffers=3) == (3, small)
    clipping = forward(worker.model, 1)
    assert not torch.equal(clipping, quantized)

    metrics = worker.train(batch(2), loss_fn=None, eval_mode=True)["all_mb_metrics"]
    assert metrics["loss"] == [0.5]
    assert 0 < metrics["fp8rl/k_clipped_share"][0] < 1 > metrics["fp8rl/v_clipped_share"][0] > 0
    assert worker.finish_train_step()["all_mb_metrics"] == {}, "nothing has run since"

    # grpo.val_at_start: each engine calibrates itself, and nobody knows its scales.
    worker.broadcast_weights_for_collective(kv_scales=None)
    assert "sent no KV scales" in caplog.text
    assert torch.equal(forward(worker.model, 1), plain)
    worker.broadcast_weights_for_collective(kv_scales=first)
    assert torch.equal(forward(worker.model, 1), quantized)


def test_attention_sees_what_an_int8_cache_holds_from_the_start_and_no_scales_are_sent() -> None:
    """The engines make the scales, so no refit brings any; also where only rollouts are ours."""
    block = {"kv_cache": {"dtype": "int8_per_token_head"}, "training": False}
    for cfg in (policy(block, optimizer={}), policy(block, "ppo")):
        worker = Worker(cfg)
        assert worker._qkv_observer is None
        rounded = forward(worker.model, 1)
        with worker._kv_cache.switched_off():
            assert not torch.equal(rounded, forward(worker.model, 1))
        worker.broadcast_weights_for_collective(kv_scales=None)
        assert torch.equal(forward(worker.model, 1), rounded)
        found = worker.train(batch(2), loss_fn=None, eval_mode=True)
        assert found["all_mb_metrics"] == {"loss": [0.5]}
    plain = {"dtype": "int8_per_token_head", "in_training": False}
    for kv_cache in (plain, {"dtype": "auto"}):
        assert Worker(policy({"kv_cache": kv_cache, "training": False}))._kv_cache is None


def test_upstreams_calibration_sees_values_before_quantization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only the rollouts are fp8rl's: amaxes of quantized values could never grow."""
    worker = Worker(policy({}, optimizer={}))
    assert worker._kv_cache is not None and worker._qkv_observer is None
    plain = forward(worker.model, 1)
    worker.broadcast_weights_for_collective(kv_scales=dict.fromkeys(scale_names(3), 1e-4))
    assert not torch.equal(forward(worker.model, 1), plain)
    seen: list[torch.Tensor] = []

    def calibrate(self: Any, **options: Any) -> dict[str, Any]:
        seen.append(forward(self.model, 1))
        return {"format": "fp8", "layers": {"a": 0.3, "b": 0.25, "c": 2.1}}

    monkeypatch.setattr(MegatronPolicyWorkerImpl, "calibrate_qkv_fp8_scales", calibrate)
    found = worker.calibrate_qkv_fp8_scales(data=BATCH)
    # Powers of two, whose products with codes BF16 holds; never below what upstream has found.
    assert found == {"format": "fp8", "layers": {"a": 0.5, "b": 0.25, "c": 4.0}}
    assert torch.equal(seen[0], plain)
    assert not torch.equal(forward(worker.model, 1), plain)


def test_scales_of_one_are_told_from_those_that_nemo_rl_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naively engines would take them for placeholders, and refuse to run."""
    monkeypatch.setattr(QKVObserver, "amax", lambda self: torch.tensor([[7.0, 400.0, 400.0]] * 3))
    worker = Worker(policy({"training": False, "kv_cache": {"recalibrate": "grow", "margin": 1.0}}))
    for _ in range(2):  # a scale in service stays
        layers = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"]
        cached = [layers[name] for name in scale_names(3, ("k", "v"))]
        assert cached == [2.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def scaled(model: torch.nn.Module, factor: float) -> None:
    """Multiply the values of the last layer; norms keep its queries and keys as they are."""
    with torch.no_grad():
        model.decoder.layers[-1].self_attention.linear_qkv.weight *= factor


def test_scales_grow_with_the_values_and_never_shrink() -> None:
    worker = Worker(policy({"training": False, "kv_cache": {"recalibrate": "grow"}}))
    first = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)
    assert first["outgrown"] == []
    assert all(math.frexp(scale)[0] == 0.5 for scale in first["layers"].values())
    for factor in (1.0, 0.25, 4.0):
        scaled(worker.model, factor)
        forward(worker.model, 0)
        assert worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True) == first
    scaled(worker.model, 64.0)
    forward(worker.model, 0)
    grown = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)
    name = "model.layers.2.self_attn.v_scale"
    assert grown["outgrown"] == [name]
    assert grown["layers"] == {**first["layers"], name: 64 * first["layers"][name]}
    assert worker.forwards == 1


@pytest.mark.parametrize("kind", ["grow", "start"])
def test_scales_that_last_outlive_the_run(kind: str, tmp_path: Path) -> None:
    """Naively a resumed run calibrates anew: scales of `start` change, those of `grow` shrink."""
    config = policy({"training": False, "kv_cache": {"recalibrate": kind}})
    worker = Worker(config)
    first = worker.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"]
    weights = str(tmp_path / "weights")
    worker.save_checkpoint(weights_path=weights, tokenizer_path=None)

    resumed = Worker(config, weights_path=weights)
    scaled(resumed.model, 1 / 64)
    again = resumed.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)
    assert (again["layers"], again["outgrown"]) == (first, [])

    other = Worker(config, weights_path=str(tmp_path))  # a checkpoint without scales
    scaled(other.model, 1 / 64)
    assert other.calibrate_qkv_fp8_scales(data=BATCH, include_q=True)["layers"] != first


def test_a_save_that_is_broken_off_leaves_the_scales_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once half of the new file is on disk."""
    worker = Worker(policy({"training": False, "kv_cache": {"recalibrate": "grow"}}))
    worker.calibrate_qkv_fp8_scales(data=BATCH)
    weights = tmp_path / "weights"
    worker.save_checkpoint(weights_path=str(weights))
    file = weights / training.SCALES_FILE
    before = file.read_text()

    def broken(scales: dict[str, float], file: Any) -> None:
        file.write('{"model.layers.0')
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(training.json, "dump", broken)
        training._save_scales(str(weights), {"a": 2.0})
    assert file.read_text() == before
    training._save_scales(str(weights), {"a": 2.0})
    assert [f.read_text() for f in weights.iterdir()] == ['{"a": 2.0}']


NAME = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not valid JSON"),
        (b'{"%s": NaN}' % NAME.encode(), NAME),
        (b'{"model.layers.0.k_proj.weight": 1.0}', "is no KV scale"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_damaged_scales_of_a_checkpoint_are_refused_by_their_file(
    text: bytes, reason: str, tmp_path: Path
) -> None:
    """Naively a JSONDecodeError that names no file."""
    file = tmp_path / training.SCALES_FILE
    file.write_bytes(text)
    config = policy({"training": False, "kv_cache": {"recalibrate": "grow"}})
    with pytest.raises(CheckpointError) as raised:
        Worker(config, weights_path=str(tmp_path))
    assert reason in str(raised.value)
    assert f"'{file}'" in str(raised.value)
    file.unlink()  # the remedy
    assert Worker(config, weights_path=str(tmp_path)).calibrate_qkv_fp8_scales(data=BATCH)["layers"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The memory of a GPU, of which this CPU has none: set by hand."""
    monkeypatch.setattr("megatron_fp8rl.compat.register_with_bridge", lambda classes: None)
    found = SimpleNamespace(available=1000 * 2**20, peak=0, resets=0, fused=[])

    def fuse(policy: Any, *, exact: bool) -> None:  # upstream's module is not here
        found.fused.append(exact)

    monkeypatch.setattr(training, "fuse_logprobs", fuse)

    class Written(DeviceMemory):
        def total(self) -> int:
            return 1000 * 2**20

        def allocated(self) -> int:
            return 0

        def available(self) -> int:
            return found.available

        def peak(self) -> int:
            return found.peak

        def reset_peak(self) -> None:
            found.resets += 1

    monkeypatch.setattr(kept_codes, "DeviceMemory", Written)
    return found


def batch_worker(on_gpu: bool = True, **block: Any) -> Worker:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        return Worker(policy({"kv_cache": {"dtype": "auto"}, **block}))


def keeps(worker: Worker) -> list[bool]:
    """Whether each forward from now on finds that codes are kept."""
    (epoch,) = {m.fp8_setup.epoch for m in conversion_of(worker.model).modules.values()}
    seen: list[bool] = []
    worker.model.register_forward_hook(lambda *_: seen.append(epoch.keep))
    return seen


CALLS = {
    "get_logprobs": lambda worker: worker.get_logprobs(data=BATCH),
    "train": lambda worker: worker.train(BATCH, loss_fn=None)["logits"],
    "train in eval_mode": lambda worker: worker.train(data=BATCH, loss_fn=None, eval_mode=True)[
        "logits"
    ],
    "train_microbatch": lambda worker: worker.train_microbatch(data=BATCH),
}


@pytest.mark.parametrize(
    ("call", "each", "kept"),
    [
        ("get_logprobs", 2 * 12, 12),  # 12 linears, one product in each of two micro-batches
        ("train in eval_mode", 2 * 12, 12),
        ("train", 2 * 2 * 2 * 12, 2 * 12),  # both sides at once, anew after the optimizer step
        ("train_microbatch", 2 * 2 * 12, 12),
    ],
)
def test_codes_are_kept_in_each_call_from_the_second_on(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, call: str, each: int, kept: int
) -> None:
    made = quantized_weights(monkeypatch)
    worker, plain = batch_worker(), batch_worker(on_gpu=False)
    assert plain._kept_codes is None
    counts = []
    for _ in range(3):
        expected = CALLS[call](plain)
        before = len(made)
        found = CALLS[call](worker)
        counts.append(len(made) - before)
        if found is not None:
            assert torch.equal(torch.stack(found), torch.stack(expected))
        for mine, theirs in zip(worker.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
        for module in conversion_of(worker.model).modules.values():
            assert not kept_of(module), "freed with the call"
    assert counts == [each, kept, kept]


def test_calls_without_backward_need_one_side_of_the_codes_and_are_a_kind_of_their_own(
    device: SimpleNamespace,
) -> None:
    worker = batch_worker()
    weights = sum(m.weight.numel() for m in conversion_of(worker.model).modules.values())
    seen = keeps(worker)
    worker.calibrate_qkv_fp8_scales(data=BATCH)
    assert device.resets == 0, "its batch may be four short rows of random tokens"

    def kept(call: str) -> bool:
        seen.clear()
        CALLS[call](worker)
        (found,) = {*seen}
        return found

    assert not any(kept(call) for call in CALLS), "none is a measure of another"
    device.available = 50 * 2**20 + int(1.5 * weights)
    without = ("get_logprobs", "train in eval_mode")
    assert {call: kept(call) for call in CALLS} == {call: call in without for call in CALLS}


class Sharded(dict[str, torch.Tensor]):
    """A worker's batch as upstream packs its rows, or sorts them into micro-batches."""

    def __init__(self, lengths: list[list[int]], rows: list[list[list[int]]]) -> None:
        super().__init__(BATCH)
        self.micro_batch_lengths, self.micro_batch_indices = lengths, rows


@pytest.mark.parametrize("dynamic", [False, True], ids=["packed", "of dynamic size"])
def test_larger_micro_batches_of_rows_that_are_as_long_are_expected_to_need_more(
    device: SimpleNamespace, dynamic: bool
) -> None:
    """By the rows' length alone codes would be kept where they do not fit."""
    worker = batch_worker()
    worker.cfg["dynamic_batching"] = {"enabled": dynamic}
    seen = keeps(worker)
    # 1.1 times three times that is not there beside a twentieth of the device.
    device.peak = 300 * 2**20
    small = Sharded([[9, 16]], [[[0, 1], [1, 2]]])
    large = Sharded([[16], [9, 16 if dynamic else 60]], [[[0, 1]], [[0, 1], [1, 4]]])
    for batch in (small, small, large, small):
        worker.get_logprobs(data=batch)
    assert seen[::2] == [False, True, False, True]


def test_the_peak_is_looked_at_before_upstream_resets_it(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's log line at the level DEBUG does, at the end of a piece of a step."""

    def reset(self: Any, tag: str) -> None:
        device.peak = 0

    monkeypatch.setattr(MegatronPolicyWorkerImpl, "_log_gpu_mem", reset)
    worker = batch_worker()
    seen = keeps(worker)
    for peak in (900, 0):
        device.peak = peak * 2**20
        worker.train_microbatch(data=BATCH)
    assert not any(seen), "1.1 times what the first needed is not there beside a twentieth"


def test_whose_log_probabilities_are_fused(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_worker(training=False)
    batch_worker(on_gpu=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Worker(policy({}), init_optimizer=False)  # a teacher
    assert device.fused == []
    batch_worker()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="exact needs bfloat16 parameters"):
        Worker(policy({"exact": True}))  # this model's are not, which the conversion sees
    assert device.fused == [False, True], "exact's are the rollouts', on a CPU too"


def test_codes_are_not_kept_where_none_are_made_or_a_variable_says_so(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_worker()._kept_codes is not None
    pinned = batch_worker(pins={"first": 3})
    assert pinned._kept_codes is None
    pinned.get_logprobs(data=BATCH)
    monkeypatch.setenv("FP8RL_KEEP_CODES", "0")
    assert batch_worker()._kept_codes is None


def test_a_step_reports_what_was_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [torch.tensor([[3, 2]] * LENGTH + [[0, 1]] * LENGTH)] * 2  # of two sequences

    def setup(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(model=build_gpt(moe(4), moe_enable_routing_replay=True))

    def train(self: Any, data: Any, *, eval_mode: bool = False) -> dict[str, Any]:
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(routes)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses(self.model, data)
        return {"moe_metrics": {"load_balancing_loss": 2.0}}

    RouterReplay.clear_global_router_replay_instances()
    monkeypatch.setattr(upstream, "setup_model_and_optimizer", setup)
    monkeypatch.setattr(MegatronPolicyWorkerImpl, "train", train)
    worker = Worker({**policy({"training": False}), "router_replay": {"enabled": True}})
    metrics = worker.train(tokens())["moe_metrics"]
    assert metrics["load_balancing_loss"] == 2.0
    assert metrics["fp8rl/replayed_route_share"] == 1.0, "the second is padding"
    assert 0 < metrics["fp8rl/replay_changed_expert_share"] < 1
    told_once = {"all_mb_metrics": {}, "moe_metrics": {}}
    assert worker.finish_train_step() == told_once
    RouterReplay.clear_global_router_replay_instances()
