"""What ``benchmarks/nemo_rl.py`` prints and draws; its configs have a contract test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, reward: list[float]) -> dict[str, Any]:
    errors = [1.001 + step / 1000 for step in range(len(reward))]
    return {
        "run": name,
        "curves": {"train/reward": reward, "train/token_mult_prob_error": errors},
    }


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, not under its own name, which is NeMo RL's."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("benchmark", BENCHMARKS / "nemo_rl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_medians_leave_the_first_step_out(benchmark: ModuleType) -> None:
    assert benchmark.first_and_median([9.0, 1.0, 3.0, 2.0]) == {"first": 9.0, "median": 2.0}
    assert benchmark.first_and_median([9.0]) == {"first": 9.0}
    told = "▶ Worker Initialization Timing:\n  Generation init: 80.5s\n  Policy init: 32.8s\n"
    assert benchmark.SETUP.findall(told) == [("Generation init", "80.5"), ("Policy init", "32.8")]


def test_a_driver_runs_beside_its_log(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In benchmarks/ its Ray workers would take the program for NeMo RL's package of that name."""
    monkeypatch.chdir(BENCHMARKS)
    command = [sys.executable, "-c", "import os; print(os.getcwd())"]
    file = tmp_path / "driver.log"
    with file.open("w", encoding="utf-8") as log:
        assert benchmark.run(command, tmp_path, log, None) == 0
    assert file.read_text(encoding="utf-8").strip() == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "bf16,fp8"], "fp8; there are bf16"),
        (["--gpus", 3], "does not divide 128"),
        (["--in-flight", "--gpus", 2], "--in-flight needs --trainer megatron --gpus 2"),
        (["--in-flight", "--single-controller"], "not allowed with"),
        (["--prompts", 0], "must be 1 or more"),
        (["--variants", "fp8rl-rollout"], "else it is fp8rl-bf16kv"),
        (["--variants", "fp8rl-exact"], "fp8rl-exact needs --trainer megatron and one GPU"),
        (
            ["--trainer", "megatron", "--family", "moonlight"],
            "--family moonlight has no --variants upstream",
        ),
        (["--programs", "40,24"], "SHORTEST,LONGEST from 1 to 96"),
        (["--programs", "24,97"], "SHORTEST,LONGEST from 1 to 96"),
        (["--programs", "24,40"], "--programs is for --task long"),
        (["--task", "long", "--model", "m", "--size", "4b"], "--size is for --task real"),
        (["--task", "long", "--gpus", 2, "--in-flight"], "--in-flight has no --task long"),
        (["--task", "long"], "--task long needs --model and has no --family"),
        (["--task", "long", "--model", "m", "--steps", 9999], "long has 16384 problems"),
    ],
)
def test_what_cannot_be_run_is_refused(
    benchmark: ModuleType,
    arguments: list[Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--source", tmp_path, "--folder", tmp_path / "out", *arguments]
    monkeypatch.setattr(sys, "argv", ["nemo_rl.py", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["sums", "real", "long"])
def test_the_exact_variant_is_served(
    benchmark: ModuleType, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_ext.config.drivers import DRIVERS
    from nemo_rl_ext.config.merge import read

    arguments = ["--source", tmp_path, "--folder", tmp_path, "--trainer", "megatron"]
    arguments += ["--variants", "fp8rl-exact", "--task", task]
    arguments += ["--model", tmp_path] if task == "long" else []
    monkeypatch.setattr(sys, "argv", ["nemo_rl.py", *map(str, arguments)])
    options = benchmark.parse()
    value = benchmark.config(options, tmp_path, tmp_path, tmp_path, "fp8rl-exact")
    del value["defaults"]
    block = value.pop("fp8rl")
    policy = value["policy"]
    for section in (policy["megatron_cfg"], policy["generation"]["vllm_cfg"], value["loss_fn"]):
        section["fp8rl"] = block
    keys = read(value, DRIVERS["grpo"])
    assert keys is not None and keys.recipe.exact and keys.recipe.kv_cache.dtype == "fp8_e4m3"
    dynamic = policy.get("dynamic_batching", {}).get("enabled", False)
    assert not (dynamic and policy["sequence_packing"]["enabled"])  # NeMo RL refuses both


def test_a_resumed_run_is_put_together(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part was ended after its third step, and the second began at the third."""

    class Events:
        """In the place of tensorboard's reader; a file of it holds JSON here."""

        def __init__(self, file: str) -> None:
            self.found = json.loads(Path(file).read_text(encoding="utf-8"))

        def Reload(self) -> None: ...

        def Tags(self) -> dict[str, list[str]]:
            return {"scalars": list(self.found)}

        def Scalars(self, tag: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(step=step, value=value) for step, value in self.found[tag]]

    name = "tensorboard.backend.event_processing.event_accumulator"
    reader: Any = ModuleType(name)
    reader.EventAccumulator = Events
    monkeypatch.setitem(sys.modules, name, reader)
    accuracy = "validation/accuracy"
    parts: list[dict[str, list[tuple[int, float]]]] = [
        {"train/reward": [(1, 0.1), (2, 0.2), (3, 0.9)], accuracy: [(0, 0.4), (2, 0.5)]},
        {
            "train/reward": [(3, 0.3), (4, 0.4)],
            "train/gen_kl_error": [(4, 1.23456789e-7)],
            accuracy: [(4, 0.6)],
        },
    ]
    for i, part in enumerate(parts, start=1):
        folder = tmp_path / "logs" / f"exp_00{i}"
        folder.mkdir(parents=True)
        (folder / "events.out.tfevents.1").write_text(json.dumps(part), encoding="utf-8")
    log = tmp_path / "run.log"
    log.write_text("", encoding="utf-8")
    whole = benchmark.summary(tmp_path / "logs", log, resumed=True)
    assert whole["curves"]["train/reward"] == [0.1, 0.2, 0.3, 0.4]
    assert whole["curves"]["train/gen_kl_error"] == [1.234568e-7]
    assert whole["validation"]["steps"] == [0, 2, 4]
    assert whole["validation"]["accuracy"] == [0.4, 0.5, 0.6]
    last = benchmark.summary(tmp_path / "logs", log, resumed=False)
    assert last["curves"]["train/reward"] == [0.3, 0.4] and "validation" not in last


@pytest.mark.parametrize("lines", [False, True], ids=["one object", "a run a line"])
def test_curves(lines: bool, tmp_path: Path) -> None:
    """A row of panels for each trainer; a run without steps is left out."""
    pytest.importorskip("matplotlib")
    runs = [
        run("dtensor-bf16", [0.5, 0.6]),
        run("dtensor-fp8rl", [0.5, 0.7, 0.8]),
        run("megatron-fp8rl", [0.4]),
        {"run": "megatron-upstream", "steps": 0, "curves": {}},
    ]
    results, figure = tmp_path / "results.json", tmp_path / "curves.svg"
    text = "\n".join(map(json.dumps, runs)) if lines else json.dumps({"runs": runs})
    results.write_text(text, encoding="utf-8")
    command = [sys.executable, BENCHMARKS / "nemo_rl_curves.py", results, "--out", figure]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = figure.read_text(encoding="utf-8")
    for text in ("dtensor: reward", "megatron: token_mult_prob_error", ">bf16<", ">fp8rl<"):
        assert text in drawn
    assert "upstream" not in drawn


def test_curves_and_table_of_long_answers(tmp_path: Path) -> None:
    """More panels; the seeds of a variant share a colour, a line of the legend and a row."""
    pytest.importorskip("matplotlib")
    runs = []
    for seed, kl in ((1, 1e-4), (2, 3e-4)):
        made = run(f"megatron-fp8rl-long-{seed}", [0.5, 0.6])
        for tag in ("gen_kl_error", "approx_entropy", "mean_gen_tokens_per_sample"):
            made["curves"][f"train/{tag}"] = [kl, kl]
        made["steps"] = 2
        made["validation"] = {"steps": [2], "accuracy": [0.5], "avg_length": [700.0]}
        made["positions"] = [{"start": 128, "tokens": 9, "kl": kl, "error": 1.01, "entropy": 0.1}]
        runs.append(made)
    runs[1]["positions"].append(runs[1]["positions"][0] | {"start": 256})  # of one seed alone
    results, figure = tmp_path / "results.json", tmp_path / "curves.svg"
    runs.append(runs[0] | {"run": "dtensor-fp8rl-long-1"})
    ended = runs[0] | {"steps": 1}  # the part of a run that was resumed
    results.write_text(json.dumps({"runs": [ended, *runs]}), encoding="utf-8")
    command = [sys.executable, BENCHMARKS / "nemo_rl_curves.py", results, "--out", figure]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    drawn = figure.read_text(encoding="utf-8")
    assert drawn.count(">fp8rl<") == 2  # one a trainer
    assert "megatron: validation accuracy" in drawn and "by position" in drawn

    command = [sys.executable, BENCHMARKS / "long_table.py", results]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(told) == 4 and told[0].endswith("KL from token 128 | KL from token 256 |")
    assert told[2].startswith("| megatron-fp8rl | 2 ± 0 | 0.5 ± 0 | 0.6 ± 0 | 0.5 ± 0 |")
    assert told[2].endswith("| 0.0002 ± 0.00014 | 0.0003 |")
    assert told[3].startswith("| dtensor-fp8rl | 2 |") and told[3].endswith("| 0.0001 | - |")
