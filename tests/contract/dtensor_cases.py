"""NeMo RL's own DTensor workers, as our subclasses, on a CPU: test_nemo_rl.py runs this file.

The second one, Automodel's, where nemo-automodel can be imported; else the first one, which would
build models of Automodel's too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_for_cuda
import pytest
import torch

pytest.importorskip("nemo_rl.algorithms.grpo", exc_type=ImportError)

import ray
from nemo_rl.algorithms import grpo
from nemo_rl.utils import config as nemo_config
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fp8rl import Recipe
from fp8rl.kv_scales import scale_names
from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.upstream import prepare
from nemo_rl_ext.workers.training import SCALES_FILE
from support.hf import convert_alone, hf_model, ids
from support.sources import source
from torch_fp8rl import export_hf
from torch_fp8rl.kv import QKVObserver

RATE = 1e-2
SECOND = importlib.util.find_spec("nemo_automodel") is not None
NAME = "Automodel" if SECOND else "DTensor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    hf_model("qwen3").save_pretrained(made)
    words = models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Any]:
    """As Ray's process makes it, in a world of one; upstream's YAML, our key, a tiny model."""
    file = source("NEMO_RL_SRC") / "examples" / "configs" / "grpo_math_1B.yaml"
    nemo_config.register_omegaconf_resolvers()
    changes = {
        "fp8rl": {},
        "loss_fn": {"fp8rl": "${fp8rl}"},
        "policy": {
            "model_name": str(folder),
            "train_global_batch_size": 2,
            "train_micro_batch_size": 1,
            "logprob_batch_size": 1,
            "dynamic_batching": {"enabled": False},
            "sequence_packing": {"enabled": False},
            "dtensor_cfg": {"_v2": SECOND, "fp8rl": "${fp8rl}"},
            "generation": {"vllm_cfg": {"fp8rl": "${fp8rl}"}},
            "optimizer": {"kwargs": {"lr": RATE}},
            "scheduler": None,
        },
    }
    value = nemo_config.merge_with_override(
        nemo_config.load_config(str(file)), OmegaConf.create(changes)
    )
    config = grpo.MasterConfig(**OmegaConf.to_container(value, resolve=True))
    config.policy.pop("scheduler")
    assert prepare(config, DRIVERS["grpo"], lambda key: None) is not None
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        world = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
        for name, number in world.items():
            patch.setenv(name, str(number))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setattr(ray, "get_gpu_ids", lambda: [0])
        cpu_for_cuda.CpuForCuda(folder).install()
        module = importlib.import_module(f"nemo_rl_ext.workers.{NAME.lower()}")
        made = getattr(module, f"Fp8{NAME}PolicyWorker").__ray_metadata__.modified_class
        # As `Policy` does; Automodel's worker reads its own.
        given = {} if SECOND else {"tokenizer": SimpleNamespace(pad_token_id=0, eos_token_id=1)}
        yield made(config.policy, **given)
        torch.distributed.destroy_process_group()


def batch(rows: torch.Tensor) -> Any:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(
        {
            "input_ids": rows,
            "input_lengths": torch.full((len(rows),), rows.shape[1], dtype=torch.int32),
            "token_mask": torch.ones_like(rows),
            "sample_mask": torch.ones(len(rows)),
        }
    )


def plain_logprobs(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows).logits.float()
    found = logits.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def test_a_step_from_the_first_calibration_to_the_refit(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the model of transformers by itself, converted."""
    rows, margin = ids(), Recipe().kv_cache.margin
    sent: list[tuple[str, torch.Tensor]] = []
    monkeypatch.setattr(
        "nemo_rl.models.policy.utils.stream_weights_via_ipc_zmq_impl",
        lambda params_generator, **options: sent.extend(params_generator),
    )
    monkeypatch.setattr(worker, "maybe_init_zmq", lambda: setattr(worker, "zmq_socket", None))
    # FSDP2 gathers BF16; in a world of one Automodel leaves it out.
    alone = hf_model("qwen3", dtype=torch.float32 if SECOND else torch.bfloat16).eval()
    convert_alone(alone)
    observer = QKVObserver(alone)
    in_fp8 = plain_logprobs(alone, rows)
    truth = {name: float(scale) for name, scale in observer.scales(margin).items()}

    scales = worker.calibrate_qkv_fp8_scales(data=batch(rows), include_q=True)["layers"]
    assert scales == truth
    first = worker.get_logprobs(data=batch(rows))["logprobs"]
    assert torch.equal(
        first, worker.get_reference_policy_logprobs(data=batch(rows))["reference_logprobs"]
    )
    assert torch.equal(first, in_fp8)

    info = worker.prepare_refit_info()
    worker.stream_weights_via_ipc_zmq(buffer_size_bytes=1, kv_scales=scales)
    assert info == {name: (tensor.shape, tensor.dtype) for name, tensor in sent}
    weights = dict(export_hf(alone))
    got = dict(sent)
    assert all(torch.equal(got[name], weights[name]) for name in weights)
    assert {name: float(got[name]) for name in scale_names(2)} == scales
    rounded = worker.get_logprobs(data=batch(rows))["logprobs"]
    assert not torch.equal(rounded, first), "attention over K and V as the cache holds them"

    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

    worker.calibrate_qkv_fp8_scales(data=batch(rows))
    worker.prepare_for_training()
    result = worker.train(batch(rows), NLLLossFn())
    assert 0 <= result["all_mb_metrics"]["fp8rl/k_clipped_share"][0] < 1
    assert float(result["grad_norm"]) > 0
    forwards: list[Any] = []
    handle = worker.model.register_forward_hook(lambda *_: forwards.append(1))
    assert worker.calibrate_qkv_fp8_scales(data=batch(rows), include_q=True)["layers"]
    assert not forwards, "the step's own forwards have been seen"
    handle.remove()
    trained = dict(export_hf(worker.model))
    assert any(not torch.equal(trained[name], weights[name]) for name in weights)
    better = worker.get_logprobs(data=batch(rows))["logprobs"]
    assert better.sum() > rounded.sum()
    reference = worker.get_reference_policy_logprobs(data=batch(rows))["reference_logprobs"]
    assert torch.equal(reference, rounded), "the first weights, through the same layers"
    again = dict(export_hf(worker.model))
    assert all(torch.equal(again[name], trained[name]) for name in trained)

    broadcast: dict[str, torch.Tensor] = {}

    def producer(iterator: Any, post_iter_func: Any, **options: Any) -> None:
        broadcast.update((name, post_iter_func((name, tensor))) for name, tensor in iterator)

    upstream = next(c for c in type(worker).__mro__ if c.__name__.startswith("DTensorPolicyWorker"))
    monkeypatch.setattr(f"{upstream.__module__}.packed_broadcast_producer", producer)
    monkeypatch.setattr(worker, "model_update_group", None, raising=False)
    worker.broadcast_weights_for_collective(kv_scales=scales)
    assert list(broadcast) == list(info)
    assert all(torch.equal(broadcast[name], trained[name]) for name in trained)


def test_a_checkpoint_holds_the_weights_and_the_kv_scales(worker: Any, tmp_path: Path) -> None:
    scales = worker.calibrate_qkv_fp8_scales(data=batch(ids()), include_q=True)["layers"]
    weights, folder = dict(export_hf(worker.model)), tmp_path / "step_1" / "policy" / "weights"
    how = {"model_save_format": "safetensors", "save_consolidated": False, "is_async": False}
    worker.save_checkpoint(str(folder), **({"checkpointing_cfg": how} if SECOND else {}))
    assert json.loads((folder / SCALES_FILE).read_text(encoding="utf-8")) == scales
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.zero_()
    worker.load_checkpoint(str(folder))
    loaded = dict(export_hf(worker.model))
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
