from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fp8rl_demo.report import ReportError, terminal_table, write_report
from fp8rl_demo.report.gpu_figures import GPU_FIGURES
from fp8rl_demo.report.runs import load_runs

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


class Page(HTMLParser):
    """Collects what a browser would fetch, ids, images' names and unclosed elements."""

    VOID = frozenset({"meta", "link", "br", "img", "use", "path", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str | None] = []
        self.stack: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        links = [values.get(k) or "" for k in ("src", "href", "xlink:href") if k in values]
        self.fetched += [link for link in links if not link.startswith(("#", "data:"))]
        self.fetched += [tag] if tag in ("script", "iframe", "link") else []
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "div" and values.get("role") == "img":
            self.labels.append(values.get("aria-label"))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def printed(out: Path) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100).print(terminal_table(out))
    return stream.getvalue()


def test_page_is_whole_self_contained_and_says_its_plots_in_words(out: Path) -> None:
    path = write_report(out)
    assert path == out / "report.html"
    html = path.read_text(encoding="utf-8")
    assert write_report(out).read_text(encoding="utf-8") == html
    page = Page(html)
    assert page.stack == []
    assert page.fetched == []
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    assert len(page.ids) == len(set(page.ids))
    assert html.count("<svg ") == len(page.labels) == 5
    assert page.labels[0] is not None
    assert "bf16: from 0.2 to 0.6; fp8-rollout: from 0.2 to 0.6" in page.labels[0]
    assert all(name in page.text for name in ("bf16", "fp8-rollout", "fp8"))
    for text in ("weights.scale_format", "pow2", "9.8.7", "kind <head>", "0.20→0.60"):
        assert text in page.text


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


@pytest.mark.parametrize("tail", ['{"step": 10, "rew', "\x00\n", '[1]\n"x"\n', '{"reward": 1}\n'])
def test_a_torn_line_costs_only_itself(tmp_path: Path, tail: str) -> None:
    write_run(tmp_path / "fp8", [0.5] * 3, tail=tail)
    (run,) = load_runs(tmp_path)
    assert run.series("reward") == ([1, 2, 3], [0.5] * 3)
    assert "0.50→0.50" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    with (tmp_path / "fp8" / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(line(1, 0.9)) + "\n")  # the later line of a step counts
    assert load_runs(tmp_path)[0].series("reward") == ([1, 2, 3], [0.5, 0.9, 0.5])


def test_runs_without_a_step_and_folders_without_a_run(tmp_path: Path) -> None:
    assert "No run was found" in write_report(tmp_path).read_text(encoding="utf-8")
    (tmp_path / "warm-start").mkdir()
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "run.json").write_text('{"recipe": {"a": ')
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "metrics.jsonl").write_text("")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No GRPO step was finished yet" in page.text
    assert [run.name for run in load_runs(tmp_path)] == ["bf16", "fp8"]
    assert "bf16" in printed(tmp_path)


def test_one_step_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    folder.mkdir()
    broken = line(0, 0.5) | {"mismatch": {"kl_k3": float("nan")}, "seconds": None}
    (folder / "metrics.jsonl").write_text(json.dumps(broken) + "\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "nan" not in page.text.lower()
    assert load_runs(tmp_path)[0].mean("mismatch", "kl_k3") is None


def test_samples_are_compared_first_with_last_and_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "fp8", [0.5])
    samples = [
        {"step": 0, "prompt": "3+4=", "answer": "7", "completion": "<unused99>"},
        {"step": 5, "prompt": "3+4=", "answer": "7", "completion": "6"},
        {"step": 9, "prompt": "3+4=", "answer": "7", "completion": "7"},
    ]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "fp8" / "samples.jsonl").write_text(text)
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "after 0 steps" in html
    assert "after 9 steps" in html
    assert "<span class='wrong'><code>&lt;unused99&gt;</code>" in html
    assert "<span class='right'><code>7</code>" in html
    text = Page(html).text
    assert "✓ right, ✗ wrong." in text and "0 of the 1 first answers" in text
    spaced = {"step": 0, "prompt": "3+4=", "answer": "7", "completion": "7 ", "right": False}
    (tmp_path / "fp8" / "samples.jsonl").write_text(json.dumps(spaced) + "\n")
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "7␣ ✗" in text and "✗ wrong, ␣ a space" in text and "1 of the 1 first answers" in text


@pytest.mark.parametrize(
    ("given", "shown"), [("/models/SmolLM2", "SmolLM2"), ("hub/SmolLM2", "hub/SmolLM2")]
)
def test_a_model_on_a_gpu_is_named_and_compared_with_bf16_there(
    out: Path, given: str, shown: str
) -> None:
    settings = {"pretrained_name": given, "task": "gcd"}
    info = {"device": "NVIDIA H100", "settings": settings, "versions": {}}
    for name, factor in (("bf16", 1.0), ("fp8-rollout", 1.0), ("fp8", 0.5)):
        (out / name / "run.json").write_text(json.dumps(info))
        seconds = {phase: value * factor for phase, value in SECONDS.items()}
        rows = [line(i, 0.5) | {"tokens": 1000, "seconds": seconds} for i in range(3)]
        rows[0]["seconds"] = dict.fromkeys(SECONDS, 60.0)  # kernels are compiled
        (out / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(out).read_text(encoding="utf-8"))
    for text in (page.text, " ".join(printed(out).split())):
        assert "fp8-rollout: rollouts 1.00x, training 1.00x" in text
        assert "fp8: rollouts 2.00x, training 2.00x" in text
        assert "on NVIDIA H100" in text or "on one NVIDIA H100" in text
        assert "500" in text and "1,000" in text  # tokens a second
        assert "simulates" not in text and "warm start" not in text
    assert f"GRPO of {shown} on 'gcd' of reasoning-gym" in page.text


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere is not a folder; give the demo's --out"):
        write_report(tmp_path / "nowhere")


def test_what_a_gpu_gains_stands_beside_a_cpus_times(out: Path) -> None:
    text = Page(write_report(out).read_text(encoding="utf-8")).text
    for shown in (text, " ".join(printed(out).split())):
        assert "simulates FP8" in shown
        assert "1.70x" in shown and "1.38x" in shown and "20 ms" in shown
    assert "13,905 tokens/s (1.36x)" in text
    results = Path(__file__).parents[2]
    for figure in GPU_FIGURES:
        assert figure.source in text
        assert (results / figure.source).is_file()


def test_the_gpu_figures_are_those_of_the_measurements() -> None:
    rollouts, linears, refit = (
        json.loads((Path(__file__).parents[2] / figure.source).read_text())
        for figure in GPU_FIGURES
    )
    speed = {
        found["variant"]: found["loads"]["256x512x1024"]["median"] for found in rollouts["results"]
    }
    ms = linears["milliseconds"]
    fp8 = ms["fp8rl measured choice, weights each time"]
    live = next(found for found in refit if found["variant"] == "fp8rl")
    own = f"{speed['stock-kv']:,.0f} tokens/s ({speed['stock-kv'] / speed['bf16']:.2f}x)"
    assert [
        (f"{speed['bf16']:,.0f} tokens/s", own, f"{speed['fp8rl-kv']:,.0f} tokens/s"),
        (f"{ms['BF16']:.1f} ms", "", f"{fp8:.1f} ms"),
        ("", "", f"{live['refit of a list']['ms_median']:.0f} ms"),
    ] == [(figure.bf16, figure.own, figure.fp8) for figure in GPU_FIGURES]
    gains = (speed["fp8rl-kv"] / speed["bf16"], ms["BF16"] / fp8)
    assert [figure.gain for figure in GPU_FIGURES] == [*(f"{gain:.2f}x" for gain in gains), ""]
