"""The wheel beside TRL or verl alone: their real libraries run the examples, FP8 on both sides.

Neither is in ``tools/cpu.txt``: ``make matrix ARGS="-s trl-1.16.0"`` and ``"-s verl-0.9.1"``.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import install
import pytest

from support.processes import answer, run_code

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # 60 s on an idle core

BEFORE = """
    import sys

    sys.modules.update(dict.fromkeys(("megatron", "nemo_rl")))  # an import of them fails
    sys.path[:0] = sys.argv[1:]
    import fp8rl, torch_fp8rl, vllm_fp8rl

    for package in (fp8rl, torch_fp8rl, vllm_fp8rl):
        assert package.__file__.startswith(sys.argv[1]), "the wheel is imported, not the checkout"

    import json
    import torch
    from torch_fp8rl.layers import Fp8Torch

    def compare(trained, llm, cache):
        '''Compare codes and KV scales of both sides; count the codes.'''
        live = llm.llm_engine.model_executor.driver_worker.model_runner.model
        codes = {}
        for module in trained.modules():
            if isinstance(module, Fp8Torch):
                codes |= module.codes_by_name()
        for name, parts in {
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "self_attn.o_proj": ("o_proj",),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
            "mlp.down_proj": ("down_proj",),
        }.items():
            held = [codes[f"model.layers.1.{name.split('.')[0]}.{part}"] for part in parts]
            linear = live.get_submodule(f"model.layers.1.{name}")
            for mine, theirs in ((0, "weight"), (1, "weight_scale_inv")):
                both = torch.cat([each[mine] for each in held]), getattr(linear, theirs)
                assert torch.equal(*(tensor.view(torch.uint8) for tensor in both)), name
        for layer, scales in zip(live.model.layers, cache._scales, strict=True):
            attention = layer.self_attn.attn
            assert [attention._k_scale.item(), attention._v_scale.item()] == scales.tolist()
        assert cache.in_service
        return len(codes)
"""

TRL = """
    import tempfile

    sys.modules["ray"] = None
    import vllm_trl

    folder = tempfile.mkdtemp()
    vllm_trl.make_tiny(folder)
    given = vllm_trl.engine_args
    vllm_trl.engine_args = lambda recipe: given(recipe) | {"enforce_eager": True}  # half a minute
    trainer = vllm_trl.train(folder, 2, None)
    generation = trainer.vllm_generation
    generation.sync_weights()  # the weights of the last step
    found = compare(generation.model, generation.llm, generation.cache)
    print(json.dumps({"codes": found, "steps": trainer.state.log_history[:2]}))
"""

# verl has no platform for a CPU and asks for a distribution named vllm; its registries take both.
VERL = """
    import asyncio
    import os
    import tempfile
    import threading
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.distributed import FileStore, init_process_group
    from transformers import PreTrainedTokenizerFast
    from verl.plugin.platform import platform_cuda, platform_manager
    from vllm import LLM

    from support.hf import hf_model

    class CPU(platform_cuda.PlatformCUDA):
        device_name, vendor_name = "cpu", "cpu"
        device_module = SimpleNamespace(
            synchronize=lambda: None,
            empty_cache=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
        )

        def current_device(self):
            return torch.device("cpu")

        def is_ipc_supported(self):
            return False

        def empty_cache(self):
            pass

    platform_manager.set_platform(CPU())
    import verl_fp8
    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    from vllm_fp8rl import engine_args

    folder = tempfile.mkdtemp()
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    sizes = {"num_hidden_layers": 3, "vocab_size": len(letters), "max_position_embeddings": 128}
    hf_model(**sizes).save_pretrained(folder)

    init_process_group("gloo", store=FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        HFModelConfig(
            path=folder,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            external_lib="verl_fp8",
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=4, lr_warmup_steps=0),
        CheckpointConfig(),
    )
    assert type(engine) is verl_fp8.Fp8Engine
    engine.initialize()

    def train():
        rows = [torch.randint(2, 250, (length,)) for length in (24, 20)]
        whole = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        data = tensordict_utils.get_tensordict(
            {
                "input_ids": whole(rows),
                "position_ids": whole([torch.arange(len(row)) for row in rows]),
                "loss_mask": whole([torch.ones(len(row)) for row in rows]),
            },
            {
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": 2,
                "temperature": 1.0,
                "use_remove_padding": False,
                "use_fused_kernels": False,
                "pad_mode": "no_padding",
                "max_response_len": 32,
                "max_response_length": 32,
                "pad_token_id": 0,
            },
        )
        with engine.train_mode():
            loss = lambda model_output, **_: (-model_output["log_probs"].values().mean(), {})
            return engine.train_batch(data, loss)["metrics"]["grad_norm"]

    llm = LLM(
        folder,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=16 << 20,
        **engine_args(verl_fp8.RECIPE) | {"worker_extension_cls": "verl_fp8.Extension"},
    )

    def send(weights):
        (handle,) = llm.collective_rpc("_get_zmq_handle")
        sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        sending = lambda: asyncio.run(sender.async_send_weights(weights))
        thread = threading.Thread(target=sending, daemon=True)
        thread.start()
        try:
            llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        finally:
            thread.join(30)
            assert not thread.is_alive(), "the sender waits for ever"
        llm.reset_prefix_cache()

    def broken(weights):
        for number, (name, tensor) in enumerate(weights):
            yield name, torch.full_like(tensor, torch.nan) if number == 3 else tensor

    send(engine.get_per_tensor_param()[0])
    norms = [train()]
    try:
        send(broken(engine.get_per_tensor_param()[0]))
    except Exception as error:
        refused = str(error)
    norms.append(train())
    send(engine.get_per_tensor_param()[0])
    compared = compare(engine.module, llm, engine.cache)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    print(json.dumps({"codes": compared, "norms": norms, "refused": refused}))
    os._exit(0)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, and the examples in it."""
    out = tmp_path_factory.mktemp("wheel")
    env = install.uv_environment(install.PYTHON)
    build = [str(install.PYTHON), "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(out)]
    subprocess.run([*build, str(ROOT)], env=env, check=True)
    (built,) = out.glob("*.whl")
    target = out / "installed"
    to = ("--quiet", "--no-deps", "--target", str(target), str(built))
    subprocess.run(install.uv_install(install.PYTHON, *to), env=env, check=True)
    for example in ("vllm_trl.py", "verl_fp8.py"):
        shutil.copy(ROOT / "examples" / example, target)
    return target


ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def vllm_version() -> str:
    """The version of vLLM, whatever its distribution is called."""
    (name,) = {*packages_distributions()["vllm"]}
    return version(name)


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_colocate(wheel: Path) -> None:
    """Two steps of GRPO, each after a refit; then both sides hold equal codes and KV scales."""
    found = answer(run_code(BEFORE + TRL, wheel, timeout=240, **ENGINE))
    assert found["codes"] == 2 * 7  # the third layer is pinned
    for step in found["steps"]:
        assert 0 < step["grad_norm"] < 100
        assert 0 < step["sampling/sampling_logp_difference/mean"] < 0.1


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
def test_verl_engine_and_worker_extension(wheel: Path, tmp_path: Path) -> None:
    """verl's FSDP2 engine trains; its sender and receiver carry weights and KV scales to vLLM.

    Without Ray's actors and verl's HTTP server, which need GPUs.
    """
    info = tmp_path / "vllm-1.dist-info"
    info.mkdir()
    declared = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}+cpu\n"
    (info / "METADATA").write_text(declared, encoding="utf-8")
    variables = {**ENGINE, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    found = answer(run_code(BEFORE + VERL, wheel, tmp_path, timeout=240, **variables))
    assert found["codes"] == 3 * 7
    assert all(0 < norm < 100 for norm in found["norms"])
    assert "NaN" in found["refused"]
