"""Programs under ``benchmarks/``: each imports on a CPU, and what can run there runs on tiny input.

The YAMLs of ``nemo_rl.py`` have contract tests (``contract/nemo_rl_cases.py``).
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from support.processes import run_code

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
INSIDE = """
import socket, sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from nemo_rl_side_by_side import isolate
isolate(Path({folder!r}))
Path("/tmp", {name!r}).touch()
Path("/dev/shm", {name!r}).touch()
with socket.create_server(("127.0.0.1", {port})) as server:
    socket.create_connection(("127.0.0.1", {port})).close()
    server.accept()[0].close()
"""
NEEDS_TRITON = ("quantize",)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a program by its name, but not under it: ``nemo_rl`` is NeMo RL's."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"benchmark_{name}", BENCHMARKS / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_pins_are_judged_by_the_whole_distribution(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers in float64, over weights that are rounded block by block here."""
    from transformers import AutoModelForCausalLM

    from support.tiny import add_chat_tokenizer, make_checkpoint

    folder = add_chat_tokenizer(make_checkpoint(tmp_path / "model", 0))
    answers, found = tmp_path / "answers.json", tmp_path / "pins.json"
    rows = {
        "weights": {"sides": ["weights"]},
        "one layer": {"sides": ["weights"], "pins": {"last": 1}},
        "none": {"pins": {"kinds": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
        "FP8 cache": {"pins": {"last": 2}, "kv_cache": {"dtype": "fp8_e4m3"}},
    }
    given = ["pins.py", folder, "--texts", 2, "--tokens", 6, "--answers", answers, "--json", found]
    for name, recipe in rows.items():
        given += ["--recipe", f"{name}={json.dumps(recipe)}"]
    monkeypatch.setattr(sys, "argv", list(map(str, given)))
    load("pins").main()
    result = json.loads(found.read_text(encoding="utf-8"))
    made = result["rows"]
    assert made["none"]["kl"] == pytest.approx(0, abs=1e-9) and made["none"]["top1"] == 1
    assert made["FP8"]["kl"] > made["weights"]["kl"] > made["one layer"]["kl"] > 1e-9
    assert made["FP8 cache"]["kl"] > 1e-9
    assert [row["bf16_flops"] for row in made.values()] == [0, 0, 0.5, 1, 1]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    texts = json.loads(answers.read_text(encoding="utf-8"))
    assert result["tokens"] == sum(len(answer) for _, answer in texts)

    def logprobs() -> list[torch.Tensor]:
        scored = (
            (model(torch.tensor([prompt + answer])).logits[0], len(prompt), len(answer))
            for prompt, answer in texts
        )
        return [each[start - 1 : start - 1 + n].log_softmax(-1) for each, start, n in scored]

    with torch.no_grad():
        plain = logprobs()
        for name, linear in model.named_modules():
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            for rows_of in linear.weight.split(128):
                for block in rows_of.split(128, 1):
                    # In float64, or as the reciprocal times 448, some ties go the other way.
                    scale = torch.tensor(448.0) / block.float().abs().max()
                    block.copy_((block.float() * scale).to(torch.float8_e4m3fn).double() / scale)
        kl = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(plain, logprobs(), strict=True)]
    assert made["weights"]["kl"] == pytest.approx(sum(kl).item() / 2, rel=1e-3)


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py")))
def test_a_program_imports_without_a_gpu(name: str, load: Any) -> None:
    if name in NEEDS_TRITON:
        pytest.importorskip("triton")
    module = load(name)
    lines = Path(module.__file__).read_text(encoding="utf-8").count("\n")
    assert module.__doc__ and lines <= 400


# --- models and data ---


def test_answers_of_programs_are_judged(load: Any) -> None:
    tasks = load("long_tasks")
    asked = tasks.problem(24, random.Random(0))
    told = tasks.demonstration(asked.prompt, random.Random(0))
    tokenizer = tasks.LongTokenizer()
    assert len(tokenizer.encode(asked.prompt, add_bos=False)) == tasks.prompt_length(24)
    assert len(tokenizer.encode(told, add_bos=False)) + 1 == tasks.answer_length(24)
    slipped = "".join(f"well{what}={digits}" for what, digits in tasks.run(asked.prompt, {3}))
    for answer, outcome in (
        (told, "right"),
        (told[: told.index("\\")], "box"),
        (told[:30], "form"),
        (slipped, "slip"),
    ):
        assert tasks.outcome(asked.prompt, answer) == outcome


def test_written_sums_are_marked_and_garbled_answers_found(load: Any) -> None:
    tasks = load("reasoning_tasks")
    entry = {"answer": "-4", "metadata": {"expression": "12 + 7 - 23"}}
    text, spans = tasks.demonstration(tasks.TASKS["sums"], entry, random.Random(0))
    assert [text[start:end] for start, end in spans] == ["19", "-4", "-4"]
    assert text.endswith(" <answer>-4</answer>")
    counted = list(range(20, 60))
    assert not tasks.is_repeated([*counted, 1, 2, 3, 1, 2, 3, *counted])
    assert tasks.is_repeated([*counted, *[1, 2, 3] * 8, *counted])
    assert tasks.is_repeated([*counted, *counted[:30] * 3])


# --- the driver of NeMo RL ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "bf16,fp8"], "fp8; there are bf16"),
        (["--gpus", 3], "does not divide 128"),
        (["--in-flight", "--gpus", 2], "--in-flight needs --trainer megatron --gpus 2"),
        (["--variants", "fp8rl-exact"], "fp8rl-exact needs --trainer megatron and one GPU"),
        (["--programs", "40,24"], "SHORTEST,LONGEST from 1 to 96"),
        (["--task", "long"], "--task long needs --model and has no --family"),
        (["--task", "long", "--gym", "legs"], "--gym is for --task reasoning"),
        (["--task", "real", "--steps", 4], "--task real needs --steps 5 or more"),
        (["--task", "real", "--prompts", 3, "--generations", 3], "multiple of 16 sequences"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[Any],
    message: str,
    tmp_path: Path,
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--source", tmp_path, "--folder", tmp_path / "out", *arguments]
    monkeypatch.setattr(sys, "argv", ["nemo_rl.py", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        load("nemo_rl").main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["sums", "real"])
def test_the_exact_variant_is_served(
    task: str, tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_ext.config.drivers import DRIVERS
    from nemo_rl_ext.config.keys import Sections
    from nemo_rl_ext.config.merge import read

    arguments = ["--source", tmp_path, "--folder", tmp_path, "--trainer", "megatron"]
    arguments += ["--variants", "fp8rl-exact", "--task", task]
    monkeypatch.setattr(sys, "argv", ["nemo_rl.py", *map(str, arguments)])
    program = load("nemo_rl")
    value = program.config(program.parse(), tmp_path, tmp_path, tmp_path, "fp8rl-exact")
    del value["defaults"]
    block = value.pop("fp8rl")
    policy = value["policy"]
    for section in (policy["megatron_cfg"], policy["generation"]["vllm_cfg"], value["loss_fn"]):
        section["fp8rl"] = block
    keys = read(Sections(value, DRIVERS["grpo"]))
    assert keys is not None and keys.recipe.exact and keys.recipe.kv_cache.dtype == "fp8_e4m3"


def test_a_resumed_run_is_put_together(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
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
    accuracy, seconds = "validation/accuracy", "timing/train/generation"
    parts: list[dict[str, list[tuple[int, float]]]] = [
        {
            "train/reward": [(1, 0.1), (2, 0.2), (3, 0.9)],
            accuracy: [(0, 0.4), (2, 0.5)],
            seconds: [(1, 9.0), (2, 3.0)],
        },
        {"train/reward": [(3, 0.3), (4, 0.4)], accuracy: [(4, 0.6)], seconds: [(3, 1.0), (4, 2.0)]},
    ]
    for i, part in enumerate(parts, start=1):
        folder = tmp_path / "logs" / f"exp_00{i}"
        folder.mkdir(parents=True)
        (folder / "events.out.tfevents.1").write_text(json.dumps(part), encoding="utf-8")
    log = tmp_path / "run.log"
    log.write_text("▶ Timing:\n  Generation init: 80.5s\n  Policy init: 32.8s\n", encoding="utf-8")
    results = load("nemo_rl_results")
    summary, judge = results.summary, results.judge_of("long", tmp_path)
    whole = summary(tmp_path / "logs", log, judge)
    assert whole["curves"]["train/reward"] == [0.1, 0.2, 0.3, 0.4]
    assert whole["validation"]["accuracy"] == [0.4, 0.5, 0.6]
    assert whole["seconds"]["generation"] == {"first": 9.0, "median": 2.0}
    assert whole["setup"] == {"Generation init": 80.5, "Policy init": 32.8}
    last = summary(tmp_path / "logs", log, None)
    assert last["curves"]["train/reward"] == [0.3, 0.4] and "validation" not in last


def test_mismatch_by_position_is_that_of_single_tokens(tmp_path: Path, load: Any) -> None:
    """In float64; a response that does not count and a line that was cut off are left out."""
    results, tasks = load("nemo_rl_results"), load("long_tasks")
    asked = tasks.problem(1, random.Random(0)).prompt
    prompt = tasks.LongTokenizer().encode(asked, add_bos=False)
    length, draw = len(prompt) + 300, torch.Generator().manual_seed(0)
    generated, trained = (-torch.rand(2, length, generator=draw)).tolist()
    trained[-1] += 3.0  # far
    row = {
        "token_loss_mask": [[0] * len(prompt) + [1] * 300],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [generated],
        "prev_logprobs": [trained],
        "token_ids": [prompt + [30 + i % 90 for i in range(300)]],
        "rewards": [0.0],
    }
    text = [json.dumps(row), json.dumps(row | {"sample_loss_mask": [0.0]}), json.dumps(row)[:99]]
    file = tmp_path / "train_data_step1.jsonl"
    file.write_text("\n".join(text), encoding="utf-8")
    found = results.read_steps([file], results.judge_of("long", tmp_path))
    assert found["outcomes"] == [{"step": 1, "form": 1}]
    assert found["lengths"] == [{"start": 256, "answers": 1, "form": 1}]
    rows = [(row["start"], row["tokens"], row["far"]) for row in found["positions"]]
    assert rows == [(0, 128, 0), (128, 128, 0), (256, 44, 1)]
    for told, end in zip(found["positions"], (128, 256, 300), strict=True):
        span = slice(len(prompt) + told["start"], len(prompt) + end)
        both = torch.tensor([trained[span], generated[span]]).double()  # float32's values
        ratio = both[0] - both[1]
        assert told["kl"] == pytest.approx((ratio.exp() - 1 - ratio).mean().item(), rel=1e-12)
        assert told["error"] == pytest.approx(ratio.abs().exp().mean().item(), rel=1e-12)


def test_runs_side_by_side_have_tmp_shared_memory_and_ports_of_their_own(
    tmp_path: Path, load: Any
) -> None:
    program = load("nemo_rl_side_by_side")
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([*program.UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make namespaces")
    name = f"fp8rl-{uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"name": name, "port": taken.getsockname()[1]}
        code = INSIDE.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path), **values)
        subprocess.run([*program.UNSHARE, sys.executable, "-c", code], check=True)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert not Path("/dev/shm", name).exists() and not Path("/tmp", name).exists()


def test_an_environment_of_nemo_rl_has_its_sources_and_stand_ins(tmp_path: Path, load: Any) -> None:
    program = load("nemo_rl_environment")
    for name, parts in program.PARTS.items():
        for part in parts:
            place = tmp_path / "from" / name / part
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix:
                place.touch()
            else:
                place.mkdir()
                (place / "kept.py").touch()
    out = tmp_path / "out"
    out.mkdir()
    program.add_sources(out, {name: tmp_path / "from" / name for name in program.PARTS})
    assert all((out / part).is_dir() for part in program.IMPORTED)
    code = "import wandb, mlflow; assert wandb.wandb_run.Run and mlflow.anything() is not None"
    found = run_code(code, folders=(out,))
    assert not found.returncode, found.stderr
