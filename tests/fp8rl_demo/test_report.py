from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp8rl_demo.report import ReportError, terminal_table, write_report
from fp8rl_demo.report.gpu_figures import GPU_FIGURES
from fp8rl_demo.report.runs import load_runs
from support.html_page import Page

ROOT = Path(__file__).parents[2]
SECONDS = {"generate": 2.0, "logprobs": 0.5, "train": 1.0, "calibrate": 0.25, "refit": 0.125}


def line(step: int, reward: float, kl: float = 1e-3) -> dict[str, Any]:
    mismatch = {
        "kl_k3": kl,
        "token_mult_prob_error": 1e9,
        "capped_prob_error": 1.0 + kl,
        "ess": 0.75,
    }
    return {
        "step": step,
        "reward": reward,
        "accuracy": reward,
        "loss": 0.1,
        "mismatch": mismatch,
        "seconds": SECONDS,
        "validation_accuracy": 0.5 if step == 9 else None,
    }


def write_run(folder: Path, rewards: list[float], *, kl: float = 1e-3, tail: str = "") -> None:
    folder.mkdir(parents=True)
    rows = [json.dumps(line(i, reward, kl)) + "\n" for i, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(rows) + tail)
    (folder / "validation.jsonl").write_text('{"step": 0, "accuracy": 0.25}\n')
    info = {
        "recipe": {"weights": {"scale_format": "pow2"}},
        "versions": {"torch": "9.8.7"},
        "pins": [{"name": "lm_head", "precision": "bf16", "reason": "kind <head>"}],
    }
    (folder / "run.json").write_text(json.dumps(info))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name in ("fp8", "bf16", "fp8-rollout"):
        write_run(tmp_path / name, [0.2] * 5 + [0.6] * 5, kl=0.0 if name == "bf16" else 1e-3)
    return tmp_path


def printed(out: Path) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100).print(terminal_table(out))
    return stream.getvalue()


def page_of(out: Path) -> Page:
    return Page(write_report(out).read_text(encoding="utf-8"))


def test_page_is_whole_self_contained_and_says_its_plots_in_words(out: Path) -> None:
    html = write_report(out).read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == page.fetched == []
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(page.ids) == len(set(page.ids))
    assert html.count("<svg ") == len(page.labels) == 5
    assert "bf16: from 0.2 to 0.6; fp8-rollout: from 0.2 to 0.6" in page.labels[0]
    for text in ("weights.scale_format", "pow2", "9.8.7", "kind <head>", "0.20→0.60", "fp8"):
        assert text in page.text
    # What a GPU gains stands beside a CPU's times.
    for shown in (page.text, " ".join(printed(out).split())):
        assert "simulates FP8" in shown
        assert "1.70x" in shown and "1.38x" in shown and "20 ms" in shown
    for figure in GPU_FIGURES:
        assert figure.source in page.text and (ROOT / figure.source).is_file()


def test_terminal_table_has_a_column_per_precision_with_the_means(out: Path) -> None:
    text = printed(out)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines()]
    shown = {row[0].strip(): row[1:] for row in rows if len(row) == 4}
    assert shown["precision"] == ["bf16", "fp8-rollout", "fp8"]
    assert shown["reward"] == ["0.20→0.60"] * 3
    assert shown["validation accuracy"] == ["25%→50%"] * 3
    assert shown["KL (k3)"][::2] == ["0.0e+00", "1.0e-03"]
    assert shown["capped error"][::2] == ["1.000", "1.001"]
    seconds = ["s/step", "generate", "logprobs", "train", "calibrate", "refit"]
    assert [shown[row][2] for row in seconds] == ["3.88", "2.00", "0.50", "1.00", "0.25", "0.12"]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    tail = '{"step": 10, "rew\n\x00\n[1]\n"x"\n{"reward": 1}\n'
    write_run(tmp_path / "fp8", [0.5] * 3, tail=tail)
    with (tmp_path / "fp8" / "metrics.jsonl").open("a") as file:
        nan = {"mismatch": {"kl_k3": float("nan")}, "seconds": None}
        for row in (line(1, 0.9), line(2, 0.5) | nan):  # the later line of a step counts
            file.write(json.dumps(row) + "\n")
    (run,) = load_runs(tmp_path)
    assert run.series("reward") == ([1, 2, 3], [0.5, 0.9, 0.5])
    assert run.mean("mismatch", "kl_k3") == pytest.approx(1e-3)


def test_runs_without_a_step_and_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere is not a folder; give the demo's --out"):
        write_report(tmp_path / "nowhere")
    assert "No run was found" in page_of(tmp_path).text
    for name in ("warm-start", "bf16", "fp8"):
        (tmp_path / name).mkdir()
    (tmp_path / "bf16" / "run.json").write_text('{"recipe": {"a": ')
    (tmp_path / "fp8" / "metrics.jsonl").write_text("")
    assert "No GRPO step was finished yet" in page_of(tmp_path).text
    assert [run.name for run in load_runs(tmp_path)] == ["bf16", "fp8"]
    assert "bf16" in printed(tmp_path)


def test_samples_are_compared_first_with_last_and_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "fp8", [0.5])
    answers = {0: "<unused99>", 5: "6", 9: "7"}
    samples = [
        {"step": step, "prompt": "3+4=", "answer": "7", "completion": completion}
        for step, completion in answers.items()
    ]
    file = tmp_path / "fp8" / "samples.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "after 0 steps" in html and "after 9 steps" in html
    assert "<span class='wrong'><code>&lt;unused99&gt;</code>" in html
    assert "<span class='right'><code>7</code>" in html
    text = Page(html).text
    assert "✓ right, ✗ wrong." in text and "0 of the 1 first answers" in text
    file.write_text(json.dumps(samples[0] | {"completion": "7 ", "right": False}) + "\n")
    text = page_of(tmp_path).text
    assert "7␣ ✗" in text and "✗ wrong, ␣ a space" in text and "1 of the 1 first answers" in text


def test_a_model_on_a_gpu_is_named_and_compared_with_bf16_there(out: Path) -> None:
    settings = {"pretrained_name": "/models/SmolLM2", "task": "gcd"}
    info = {"device": "NVIDIA H100", "settings": settings, "versions": {}}
    for name, factor in (("bf16", 1.0), ("fp8-rollout", 1.0), ("fp8", 0.5)):
        (out / name / "run.json").write_text(json.dumps(info))
        seconds = {phase: value * factor for phase, value in SECONDS.items()}
        rows = [line(i, 0.5) | {"tokens": 1000, "seconds": seconds} for i in range(3)]
        rows[0]["seconds"] = dict.fromkeys(SECONDS, 60.0)  # kernels are compiled
        (out / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(out)
    for text in (page.text, " ".join(printed(out).split())):
        assert "fp8-rollout: rollouts 1.00x, training 1.00x" in text
        assert "fp8: rollouts 2.00x, training 2.00x" in text
        assert "on NVIDIA H100" in text or "on one NVIDIA H100" in text
        assert "500" in text and "1,000" in text  # tokens a second
        assert "simulates" not in text and "warm start" not in text
    assert "GRPO of SmolLM2 on 'gcd' of reasoning-gym" in page.text
