"""Models of real size for ``benchmarks/nemo_rl.py``: weights, words, cache, phases, resume."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from fp8rl import PluginManager, Recipe
from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1000,
    "eos_token_id": 1001,
}
SECONDS = {
    "generation": 10.0,
    "policy_and_reference_logprobs": 4.0,
    "policy_training": 12.0,
    "prepare_for_generation/transfer_and_update_weights": 1.0,
    "prepare_for_generation/total": 3.0,
    "training_prep": 0.5,
    "total_step_time": 31.0,
}


@pytest.fixture(scope="module")
def real() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark; the folder is not left on the path, for its ``nemo_rl``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import nemo_rl_real
        import real_model

        spec = importlib.util.spec_from_file_location("benchmark", BENCHMARKS / "nemo_rl.py")
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        yield SimpleNamespace(model=real_model, runs=nemo_rl_real, program=program)


def result(name: str, factor: float, *, shared: bool = False) -> dict[str, Any]:
    seconds = {phase: {"first": 99.0, "median": s * factor} for phase, s in SECONDS.items()}
    return {"run": name, "exit": 0, "steps": 5, "seconds": seconds, "upper_bounds": shared}


# --- the model ---


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "30b-a3b-12l"])
def test_shapes_are_those_of_qwen3(real: SimpleNamespace, size: str) -> None:
    shape = real.model.shape_of(size)
    policy = PluginManager(discover=False).pin_policy(Recipe().pins, ModelSpec.of(shape).names)
    billions = {"1.7b": 1.72, "4b": 4.02, "8b": 8.19, "30b-a3b-12l": 8.10}[size]
    assert Sizes(ModelSpec.of(shape), 1).elements(policy.report()) / 1e9 == pytest.approx(
        billions, abs=0.005
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_written_once_and_loads(
    real: SimpleNamespace, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(real.model, "SHARD_BYTES", 300_000)
    shape = real.model.shape_of("8b") | SMALL | {"tie_word_embeddings": tied}
    folder = real.model.make_model(tmp_path / "model", shape)
    real.model.make_weights(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    before = (folder / real.model.INDEX).stat().st_mtime_ns
    real.model.make_weights(folder)
    assert (folder / real.model.INDEX).stat().st_mtime_ns == before
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = dict(loaded.named_parameters())
    index = json.loads((folder / real.model.INDEX).read_text(encoding="utf-8"))
    assert set(index["weight_map"]) == set(weights)
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert (weight == 1).all(), name
        else:
            assert weight.detach().float().std().item() == pytest.approx(0.02, rel=0.1), name
    logits = loaded(torch.randint(1024, (1, 64))).logits.float()
    # Uniform logits would have log(1024); a width of 128 has a quarter of a real model's spread.
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 6 < entropy < 6.94


def test_a_model_with_fewer_experts(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(real.model, "make_model", lambda folder, shape: made.append(shape))
    monkeypatch.setattr(real.model, "make_weights", lambda folder, plain, heavy_tails: None)
    command = ["real_model.py", "x", "--size", "30b-a3b-12l", "--layers", "4", "--experts"]
    monkeypatch.setattr(sys, "argv", [*command, "32"])
    real.model.main()
    assert (made[0]["num_hidden_layers"], made[0]["num_experts"]) == (4, 32)
    for refused in ([*command, "7"], ["real_model.py", "x", "--size", "8b", "--experts", "32"]):
        monkeypatch.setattr(sys, "argv", refused)
        with pytest.raises(SystemExit):
            real.model.main()
        assert f"has no {refused[-1]} experts a layer" in capsys.readouterr().err
    assert len(made) == 1


def test_experts_are_written_one_by_one(real: SimpleNamespace, tmp_path: Path) -> None:
    """As a checkpoint has them, which transformers makes to stacks, NeMo RL's bridge and vLLM to
    shards."""
    from transformers import AutoModelForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = real.model.shape_of("30b-a3b-12l")
    assert shape["num_hidden_layers"] == 12 and shape["num_experts"] == 128
    folder = real.model.make_model(tmp_path, shape | SMALL | experts)
    real.model.make_weights(folder)
    names = json.loads((folder / real.model.INDEX).read_text(encoding="utf-8"))["weight_map"]
    assert {
        name for name in ModelSpec.of(shape | SMALL | experts).names if ".experts." in name
    } == {name.removesuffix(".weight") for name in names if ".experts." in name}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    layers = (shape | SMALL)["num_hidden_layers"]
    for name, weight in loaded.named_parameters():
        if weight.ndim > 1:
            spread = (
                0.02 / math.sqrt(2 * layers) if "o_proj" in name or "down_proj" in name else 0.02
            )
            spread = 1 if "embed_tokens" in name else spread
            assert weight.detach().float().std().item() == pytest.approx(spread, rel=0.1), name


def test_experts_share_the_tokens(real: SimpleNamespace, tmp_path: Path) -> None:
    """As in a trained model, where a loss balances them: with 0.02 in every matrix the busiest
    expert of the last layers has three to four times the mean here, and others none."""
    import real_routes

    wide = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 10}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    folder = real.model.make_model(
        tmp_path, real.model.shape_of("30b-a3b-12l") | SMALL | wide | experts
    )
    real.model.make_weights(folder)
    loads = real_routes.expert_loads(folder, 1000, length=128)
    assert [int(load.sum()) for load in loads] == [1000 * 4] * 10
    balances = [real_routes.balance(load, 4) for load in loads]
    for each in balances:
        assert 1 < each["busiest expert over mean"] < 2.5, balances
        assert 1 <= each["busiest GPU over mean"] < 1.3, balances
        assert each["share of experts without tokens"] == 0
    uneven = torch.tensor([6, 0, 1, 1])
    assert real_routes.balance(uneven, 2) == {
        "busiest expert over mean": 3.0,
        "busiest GPU over mean": 1.5,
        "share of experts without tokens": 0.25,
    }


def test_prompts_and_answers_are_words(real: SimpleNamespace, tmp_path: Path) -> None:
    shape = real.model.shape_of("8b")
    tokenizer = real.model.make_tokenizer(shape)
    assert len(tokenizer) == shape["vocab_size"]
    assert tokenizer.eos_token_id == shape["eos_token_id"]
    assert tokenizer.pad_token_id == shape["bos_token_id"]
    file = real.runs.make_data(tmp_path / "prompts.jsonl", shape, 3)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = tokenizer(row["input"], add_special_tokens=False)["input_ids"]
        assert len(ids) == 512 and tokenizer.decode(ids) == row["input"]
        assert row["output"] in ("A", "B") and "Answer" not in row["input"]


# --- the runs ---


def test_the_cache_holds_all_sequences(real: SimpleNamespace) -> None:
    """Sixteen samples of a prompt have its blocks of 16 tokens together, but for the last one."""
    shape = real.model.shape_of("4b")
    tokens = 16 * 496 + 256 * (16 + 1024)
    # INT8 has 36 layers x 2 x 8 heads of 4 bytes of scales more.
    for dtype, each in (("auto", 147_456), ("fp8_e4m3", 73_728), ("int8_per_token_head", 76_032)):
        needed = tokens * each
        assert needed < real.runs.cache_bytes(shape, 16, 256, dtype) < 1.04 * needed


def test_a_driver_ends_at_its_limit_and_when_the_benchmark_is_interrupted(
    real: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        assert real.program.run(command, tmp_path, log, 0.5) is None
        monkeypatch.setattr(real.program.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            real.program.run(command, tmp_path, log, None)
    assert [process.poll() for process in started] == [-9, -9]


@pytest.mark.parametrize(("gpus", "engine", "micro"), [(1, 256, 8), (2, 128, 4)])
def test_each_gpu_has_an_engine_for_its_share(
    real: SimpleNamespace, gpus: int, engine: int, micro: int, tmp_path: Path
) -> None:
    options = ["--task", "real", "--size", "8b", "--source", str(tmp_path), "--folder", "x"]
    options += ["--gpus", str(gpus)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nemo_rl.py", *options])
        given = real.program.parse()
    value = real.program.config(given, tmp_path, tmp_path / "data", tmp_path / "logs", "fp8rl")
    assert value["cluster"]["gpus_per_node"] == gpus
    policy, shape = value["policy"], real.model.shape_of("8b")
    assert policy["train_micro_batch_size"] == micro
    assert policy["train_global_batch_size"] == 256
    kwargs = policy["generation"]["vllm_kwargs"]
    assert policy["generation"]["vllm_cfg"]["tensor_parallel_size"] == 1
    assert kwargs["max_num_seqs"] == engine
    cache = real.runs.cache_bytes(shape, 16 // gpus, engine, "fp8_e4m3")
    assert kwargs["kv_cache_memory_bytes"] == cache
    graphs = kwargs["compilation_config"]["cudagraph_capture_sizes"]
    assert graphs == sorted(set(graphs)) and graphs[-1] == engine
    # Moments of 8B have room on one GPU only in their smaller form.
    optimizer = policy["megatron_cfg"]["optimizer"]
    assert optimizer["use_precision_aware_optimizer"] == (gpus == 1)
    assert policy["megatron_cfg"]["activation_checkpointing"] == (gpus == 1)


@pytest.mark.parametrize(("gpus", "micro"), [(1, 4), (4, 8)])
def test_experts_are_shared_by_the_gpus(
    real: SimpleNamespace, gpus: int, micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--task", "real", "--size", "30b-a3b-12l", "--source", str(tmp_path)]
    command = ["nemo_rl.py", *options, "--folder", "x", "--gpus", str(gpus)]
    monkeypatch.setattr(sys, "argv", command)
    given = real.program.parse()
    value = real.program.config(given, tmp_path, tmp_path / "data", tmp_path / "logs", "fp8rl")
    policy = value["policy"]
    assert policy["megatron_cfg"]["expert_model_parallel_size"] == gpus
    assert policy["megatron_cfg"]["activation_checkpointing"] == (gpus == 1)
    assert policy["train_micro_batch_size"] == micro
    assert policy["generation"]["vllm_cfg"]["tensor_parallel_size"] == 1
    assert "moe_backend" not in policy["generation"]["vllm_kwargs"]
    bf16 = real.program.config(given, tmp_path, tmp_path / "data", tmp_path / "logs", "bf16")
    assert bf16["policy"]["generation"]["vllm_kwargs"]["moe_backend"] == "triton"
    monkeypatch.setattr(sys, "argv", [*command, "--size", "8b"])
    dense = real.program.config(
        real.program.parse(), tmp_path, tmp_path / "data", tmp_path / "logs", "bf16"
    )
    assert "expert_model_parallel_size" not in dense["policy"]["megatron_cfg"]
    assert "moe_backend" not in dense["policy"]["generation"]["vllm_kwargs"]


def test_medians_leave_two_steps_out(real: SimpleNamespace) -> None:
    taken = real.program.first_and_median([9.0, 8.0, 1.0, 3.0, 2.0], 2)
    assert taken == {"first": 9.0, "median": 2.0}
    assert not real.runs.is_complete({"steps": 4})
    assert not real.runs.is_complete({"exit": 1})


def test_table(real: SimpleNamespace) -> None:
    """Each second is in one row; a run without its steps has no column."""
    found = real.runs.phases(result("bf16", 1))
    assert found["sleep, wake-up, moves to and from the host"] == 2.5
    assert found["rest"] == pytest.approx(1.5)
    assert sum(found.values()) == pytest.approx(2 * found["whole step"])
    runs = [
        result("bf16", 1),
        {"run": "up", "upper_bounds": False},
        result("ours", 0.5, shared=True) | {"set": ["a=1", "b=2"]},
    ]
    text = real.runs.table(runs, ["bf16", "upstream", "fp8rl"])
    assert "| median seconds | bf16 | share | fp8rl |" in text
    assert "| rollout | 10.00 | 32% | 5.00 (2.00x) |" in text
    assert "| whole step | 31.00 | 100% | 15.50 (2.00x) |" in text
    assert text.endswith(
        "Upper bounds, since others used the machine: fp8rl.\n\n"
        "fp8rl was run with --set a=1 --set b=2."
    )
    assert real.runs.table(runs[1:2], ["upstream"]) == "No run has the steps of a median."


def test_a_machine_is_shared_while_its_gpu_is_used(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter(["9000\n3", "9000\n3", "3\n3"])
    monkeypatch.setattr(real.runs, "IDLE_LOAD", 1e9)
    monkeypatch.setattr(real.runs.shutil, "which", lambda name: name)
    answer = lambda *args, **kwargs: SimpleNamespace(stdout=next(used))  # noqa: E731
    monkeypatch.setattr(real.runs.subprocess, "run", answer)
    monkeypatch.setattr(real.runs.time, "sleep", lambda seconds: None)
    assert not real.runs.is_shared()  # the workers of an earlier run have ended
    used = iter(["9000"])
    assert real.runs.is_shared(patience=0)


def test_a_run_with_a_result_is_not_run_again(
    real: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its result stands in the table, and a driver that ends at once has none."""
    program: ModuleType = real.program
    folder, source = tmp_path / "out", tmp_path / "source"
    (source / "examples").mkdir(parents=True)
    (source / "examples" / "run_grpo.py").write_text(
        "print('==== Step 1/5 ====\\n  • Total step time: 41.20s')", encoding="utf-8"
    )
    folder.mkdir()
    done = folder / "megatron-bf16-4b.json"
    done.write_text(json.dumps(result("megatron-bf16-4b", 1)), encoding="utf-8")
    command = ["nemo_rl.py", "--task", "real", "--source", source, "--folder", folder]
    (tmp_path / "config.json").write_text(json.dumps(real.model.shape_of("4b")), encoding="utf-8")
    command += ["--model", tmp_path, "--variants", "bf16,fp8rl"]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    monkeypatch.setattr(program, "is_shared", lambda: False)
    (folder / "logs-megatron-fp8rl-4b" / "exp_001").mkdir(parents=True)
    monkeypatch.setattr(program, "summary", lambda *arguments: pytest.fail("an earlier run's"))
    assert program.main() == 0
    told = capsys.readouterr()
    (line,) = told.out.splitlines()
    assert json.loads(line)["run"] == "megatron-fp8rl-4b"
    assert "s: Step 1/5\n" in told.err and "Total step time: 41.20s\n" in told.err
    assert "| rollout | 10.00 |" in (folder / "real-4b.md").read_text(encoding="utf-8")
    assert not (folder / "megatron-bf16-4b.log").exists()
    assert not (folder / "megatron-fp8rl-4b.json").exists()
    written = yaml.safe_load((folder / "megatron-fp8rl-4b.yaml").read_text(encoding="utf-8"))
    assert written["policy"]["megatron_cfg"]["enabled"]

    kept = result("megatron-bf16-4b", 1) | {"sequences": 128}
    done.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(SystemExit, match="another number of sequences"):
        program.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--write-only"])
    assert program.main() == 0
    assert (folder / "megatron-bf16-4b.yaml").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "4"], "--steps 5 or more"),
        (["--prompts", "3", "--generations", "1"], "a multiple of 16 sequences"),
        (["--prompts", "3", "--generations", "16", "--gpus", "2"], "a multiple of 32 sequences"),
        (["--in-flight", "--gpus", "2"], "--in-flight has no --task real"),
        (["--size", "8b"], "no model of real_model.py --size 8b"),
        (["--trainer", "dtensor"], "needs --trainer megatron"),
    ],
)
def test_what_has_no_median_is_refused(
    real: SimpleNamespace,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(real.model.shape_of("4b")), encoding="utf-8")
    folder = tmp_path / "out"
    command = ["nemo_rl.py", "--task", "real", "--source", "x", "--folder", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, "--model", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        real.program.main()
    assert message in capsys.readouterr().err
    assert not folder.exists()
