"""Long answers: the problems, the model that learns them in miniature, and mismatch by position."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark; the folder is not left on the path, for its ``nemo_rl``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import long_model
        import long_tasks
        import nemo_rl_long

        yield SimpleNamespace(tasks=long_tasks, model=long_model, runs=nemo_rl_long)


@pytest.fixture
def tasks(benchmark: SimpleNamespace) -> ModuleType:
    return benchmark.tasks


# --- problems ---


def test_each_instruction(tasks: ModuleType) -> None:
    digits = [1, 2, 8, 9]
    found = {op: tasks.step(op, 2, digits) for op in tasks.OPERATIONS}
    assert found == {
        "+": [3, 4, 0, 1],
        "-": [9, 0, 6, 7],
        "<": [8, 9, 1, 2],
        ">": [8, 9, 1, 2],
        "~": [1, 0, 4, 3],
    }
    assert tasks.step("<", 1, digits) == [2, 8, 9, 1]
    assert tasks.step(">", 1, digits) == [9, 1, 2, 8]
    with pytest.raises(ValueError, match=r"'\^' is no operation"):
        tasks.step("^", 1, digits)


@pytest.mark.parametrize("steps", [1, 24, 96])
def test_a_right_answer_has_the_length_it_is_said_to_have(tasks: ModuleType, steps: int) -> None:
    tokenizer = tasks.LongTokenizer()
    asked = tasks.problem(steps, random.Random(steps))
    told = tasks.demonstration(asked.prompt, random.Random(0))
    assert tasks.is_right(asked.answer, told)
    assert len(tokenizer.encode(asked.prompt, add_bos=False)) == tasks.prompt_length(steps)
    assert len(tokenizer.encode(told, add_bos=False)) + 1 == tasks.answer_length(steps)
    assert 500 < tasks.answer_length(24) < tasks.answer_length(94) < 2000


def test_slips_follow_two_of_the_words(tasks: ModuleType) -> None:
    """The example of the module's own description, and shares over many lines."""
    told = [digits for _, digits in tasks.run("#00+3#01~1|80461733")]
    assert told == ["13794066", "77150842"]
    assert [d for _, d in tasks.run("#00+3#01~1|80461733", {0})] == ["23794066", "77150843"]
    choose = random.Random(0)
    found = {word: [0, 0] for word in tasks.WORDS}
    for _ in range(300):
        asked = tasks.problem(20, choose).prompt
        digits = asked.partition("|")[2]
        line = re.compile(rf"({'|'.join(tasks.WORDS)})#\d\d(.)(\d)=(\d+)")
        for word, operation, number, told in line.findall(
            tasks.demonstration(asked, choose, slips=0.1)
        ):
            right = tasks.step(operation, int(number), [int(x) for x in digits])
            found[word][0] += told != "".join(map(str, right))
            found[word][1] += 1
            digits = told
    shares = {word: slipped / lines for word, (slipped, lines) in found.items()}
    careless = [shares.pop(word) for word in tasks.CARELESS]
    assert careless == pytest.approx([0.4, 0.4], abs=0.06)
    assert set(shares.values()) == {0.0}
    with pytest.raises(ValueError, match=r"0 to 0.25 of the lines, not 0.3"):
        tasks.demonstration(asked, choose, slips=0.3)


def test_a_slip_anywhere_is_wrong_at_the_end(tasks: ModuleType) -> None:
    for seed in range(20):
        asked = tasks.problem(9, random.Random(seed))
        *_, (_, digits) = tasks.run(asked.prompt, {seed % 9})
        assert not tasks.is_right(asked.answer, rf"\boxed{{{digits}}}")
    assert not tasks.is_right("12", "21")
    assert not tasks.is_right("12", r"\boxed{12} or \boxed{21}")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda text: text, "right"),
        # A reward looks at the last box alone.
        (lambda text: text.replace("so#08", "#08"), "right"),
        (lambda text: text.replace("so#08+3=4", "so#08+3=5").replace("{4", "{5"), "slip"),
        (lambda text: text.replace("so#08+3=45", "so#08+3=46").replace("{45", "{46"), "digits"),
        (lambda text: text.replace("#08+3=4", "#08+2=3").replace("{4", "{3"), "instruction"),
        (lambda text: text.replace("#08+3=4", "#08-3=3").replace("{4", "{3"), "instruction"),
        (lambda text: text.replace("#08+3=4", "#07+3=3").replace("{4", "{3"), "instruction"),
        (lambda text: text.replace("{4", "{5"), "box"),
        (lambda text: text[: text.index("\\")], "box"),
        (lambda text: text[:30], "form"),
        (lambda text: text.replace("so#08", "#08").replace("{4", "{5"), "form"),
        (lambda text: "", "form"),
    ],
)
def test_what_is_wrong_first(change: Callable[[str], str], kind: str, tasks: ModuleType) -> None:
    prompt = "#07>1#08+3|2345678901234561"
    right = "now#07>1=1234567890123456so#08+3=4567890123456789\\boxed{4567890123456789}"
    assert tasks.outcome(prompt, change(right)) == kind


def test_a_mistake_in_an_early_line_is_named_before_later_ones(tasks: ModuleType) -> None:
    prompt = "#07>1#08+3|2345678901234561"
    lines = tasks.run(prompt, {0})
    told = "".join(f"well{what}={digits}" for what, digits in lines).replace("+3", "+1")
    assert tasks.outcome(prompt, told) == "slip"


def test_nothing_is_right_where_nothing_was_asked(tasks: ModuleType) -> None:
    assert tasks.outcome("", "\\boxed{1}") == tasks.outcome("12", "") == "form"


def test_problems_follow_from_their_arguments(tasks: ModuleType) -> None:
    def made(split: str, seed: int) -> list[Any]:
        return list(tasks.problems(split, 50, seed, 3, 5))

    assert made("train", 0) == made("train", 0)
    assert not {p.prompt for p in made("train", 0)} & {p.prompt for p in made("validation", 0)}
    assert {p.prompt.count("#") for p in made("train", 1)} == {3, 4, 5}
    with pytest.raises(ValueError, match="1 to 96 steps, not 97"):
        tasks.problem(97, random.Random(0))


def test_transformers_and_vllm_get_the_same_tokens(tasks: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tasks.LongTokenizer()
    tokenizer.save_pretrained(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    asked = tasks.problem(30, random.Random(0))
    text = asked.prompt + tasks.demonstration(asked.prompt, random.Random(0))
    ids = tokenizer.encode(text, add_bos=False)
    assert len(hf) == tokenizer.vocab_size == 128
    assert hf(text, add_special_tokens=False).input_ids == ids
    assert hf.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == text
    assert tokenizer.decode(ids) == text


# --- the model ---


def test_seeds_have_other_weights_and_programs(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    first, again, other = (
        benchmark.model.WarmStart(options(tmp_path / "none", seed=seed)) for seed in (0, 0, 1)
    )
    weights = [next(start.model.parameters()) for start in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    losses = [start.step().item() for start in (first, again)]
    assert losses[0] == losses[1]
    other.model.load_state_dict(
        benchmark.model.WarmStart(options(tmp_path / "none")).model.state_dict()
    )
    assert other.step().item() != losses[0]


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    given = {
        "folder": folder,
        "size": "tiny",
        "longest": 2,
        "slips": 0.02,
        "limit": 1e9,
        "steps": 12,
        "stop_at": 1.0,
        "tokens": 512,
        "learning_rate": 3e-2,
        "seed": 0,
    }
    return argparse.Namespace(**(given | changes))


def test_a_model_in_miniature_learns_and_goes_on(
    benchmark: SimpleNamespace, tmp_path: Path
) -> None:
    whole = benchmark.model.WarmStart(options(tmp_path / "whole"))
    losses = [whole.step().item() for _ in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

    half = benchmark.model.WarmStart(options(tmp_path / "parts"))
    for _ in range(6):
        half.step()
    half.save_checkpoint()
    rest = benchmark.model.WarmStart(options(tmp_path / "parts"))
    assert rest.steps == 6
    assert [rest.step().item() for _ in range(6)] == pytest.approx(losses[6:], rel=1e-3)
    assert 0 <= rest.expected_accuracy(2) < 1e-3
    assert rest.sampled_accuracy(1) == 0
    rest.save_model()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    hf = AutoTokenizer.from_pretrained(tmp_path / "parts")
    message = [{"role": "user", "content": "#01+2|0000000000000000"}]
    assert hf.apply_chat_template(message, tokenize=False) == message[0]["content"]


def test_the_accuracy_to_be_expected_is_that_of_a_certain_model(
    benchmark: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that knows each token but is of two minds about the word, and about one digit."""
    start = benchmark.model.WarmStart(options(tmp_path, longest=1))
    tokens, prompt = start.batch(1, random.Random("expected accuracy"), 0.0, 4)
    logits = torch.full((*tokens.shape, 128), -1e4)
    logits.scatter_(-1, tokens[..., None], 0.0)
    other = start.tokenizer.encode("now", add_bos=False)[0]
    logits[:, prompt, other] = 0.0  # both words are right
    last = tokens[:, -3]
    logits[torch.arange(4), -3, (last - 4 + 1) % 10 + 4] = 0.0  # half of the probability is wrong
    monkeypatch.setattr(start, "model", lambda input_ids: SimpleNamespace(logits=logits[:, 1:]))
    assert start.expected_accuracy(4) == pytest.approx(0.5)


def test_a_live_engine_over_an_fp8_cache_answers_and_its_mistakes_are_counted(
    benchmark: SimpleNamespace, tmp_path: Path
) -> None:
    """Of a model that has learned nothing no answer has the form of one."""
    started = benchmark.model.WarmStart(options(tmp_path / "model"))
    started.save_model()
    out = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "long_validation.py"), "--programs", "1,2"]
    command += ["--model", str(tmp_path / "model"), "--count", "3", "--variants", "fp8rl-kv"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert found["mistakes"] == {"form": 3}
    assert (found["count"], found["right"], found["standard_error"]) == (3, 0.0, 0.0)
    assert found["tokens"] > 0


# --- what a run's files tell ---


def row(prompt: list[int], response: list[int], **changes: Any) -> dict[str, Any]:
    """A line of NeMo RL's for one response; the padding after it has no log-probabilities."""
    padding = [0] * 3
    length = len(prompt) + len(response) + len(padding)
    return {
        "content": [["", ""]],
        "token_loss_mask": [[0] * len(prompt) + [1] * len(response) + padding],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [[0.0] * length],
        "prev_logprobs": [[0.0] * length],
        "token_ids": [prompt + response + padding],
    } | changes


def test_mismatch_by_position(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    """Against sums over single tokens in float64; a line that was cut off is left out."""
    draw = torch.Generator().manual_seed(0)
    asked = benchmark.tasks.problem(1, random.Random(0)).prompt
    prompt = benchmark.tasks.LongTokenizer().encode(asked, add_bos=False)
    begin = len(prompt)
    rows, tokens = [], []
    for length in (5, 300):
        written = row(prompt, [30 + i % 90 for i in range(length)])
        size = len(written["token_ids"][0])
        generated = (-torch.rand(size, generator=draw)).tolist()
        trained = (-torch.rand(size, generator=draw)).tolist()
        # The last token of each is far: the trainer finds one likelier, one less likely.
        trained[begin + length - 1] += 3.0 if length == 5 else -2.0
        written |= {"generation_logprobs": [generated], "prev_logprobs": [trained]}
        rows.append(json.dumps(written))
        tokens += [(i, generated[begin + i], trained[begin + i]) for i in range(length)]
    left_out = json.loads(rows[1]) | {"sample_loss_mask": [0.0]}
    file = tmp_path / "train_data_step1.jsonl"
    file.write_text("\n".join([*rows, json.dumps(left_out), rows[1][:99]]), encoding="utf-8")
    compared = benchmark.runs.read_steps([file])
    found = compared["positions"]
    assert [(told["start"], told["tokens"], told["far"]) for told in found] == [
        (0, 133, 1),
        (128, 128, 0),
        (256, 44, 1),
    ]
    likelier, less = compared["farthest"]  # the former has more of KL
    ids = json.loads(rows[1])["token_ids"][0]
    assert (likelier["position"], likelier["token_ids"]) == (4, ids[: begin + 5])
    assert (less["position"], less["token_ids"]) == (299, ids[begin + 257 : begin + 300])
    for token, index in ((likelier, 4), (less, len(tokens) - 1)):
        _, *both = tokens[index]
        assert [token["generation"], token["trainer"]] == pytest.approx(both, rel=1e-6)
        assert token["kl"] == pytest.approx(math.expm1(both[1] - both[0]) - both[1] + both[0])
        assert token["file"] == file.name
    for told, end in zip(found, (128, 256, 512), strict=True):
        log_ratio, entropy = [], []
        for i, generated, trained in tokens:
            if told["start"] <= i < end:
                log_ratio.append(torch.tensor(trained).double() - torch.tensor(generated).double())
                entropy.append(-generated)
        exact = torch.stack(log_ratio)
        assert told["kl"] == pytest.approx((exact.exp() - 1 - exact).mean().item(), rel=1e-12)
        assert told["error"] == pytest.approx(exact.abs().exp().mean().item(), rel=1e-12)
        assert told["entropy"] == pytest.approx(sum(entropy) / len(entropy), rel=1e-6)


def test_outcomes_of_each_step(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    """Steps come in their order, and an answer that is cut off has no right form."""
    tasks = benchmark.tasks
    tokenizer = tasks.LongTokenizer()
    asked = tasks.problem(3, random.Random(0)).prompt
    prompt = tokenizer.encode(asked, add_bos=False)
    response = tokenizer.encode(tasks.demonstration(asked, random.Random(0)), add_bos=False)
    right, cut_off = row(prompt, [*response, tokenizer.eos_id]), row(prompt, response[:30])
    for step, rows in ((10, [right, cut_off, right]), (9, [cut_off])):
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / f"train_data_step{step}.jsonl").write_text(text, encoding="utf-8")
    found = benchmark.runs.read_steps(tmp_path.glob("*.jsonl"))["outcomes"]
    assert found == [{"step": 9, "form": 1}, {"step": 10, "right": 2, "form": 1}]


def test_mismatch_by_kind_of_token(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    """The operand of each line is far; of a longer answer places do not tell the kind."""
    tasks = benchmark.tasks
    tokenizer = tasks.LongTokenizer()
    asked = tasks.problem(2, random.Random(0)).prompt
    text = tasks.demonstration(asked, random.Random(0))
    ids = [*tokenizer.encode(text, add_bos=False), tokenizer.eos_id]
    assert len(tasks.token_kinds(2)) == len(ids)
    begin = tasks.prompt_length(2)
    prompt = tokenizer.encode(asked, add_bos=False)
    written, longer = row(prompt, ids), row(prompt, [ids[0], *ids])
    places = [i for i, token in enumerate(re.findall(tokenizer.pattern, text)) if token in "+-<>~"]
    for place in places:
        written["prev_logprobs"][0][begin + place + 1] = -2.0
    file = tmp_path / "train_data_step1.jsonl"
    file.write_text(f"{json.dumps(written)}\n{json.dumps(longer)}\n", encoding="utf-8")
    found = {told["kind"]: told for told in benchmark.runs.read_steps([file])["kinds"]}
    assert {kind: told["tokens"] for kind, told in found.items()} == {
        **dict.fromkeys(("word", "number", "sign", "operand", "equals", "first digit"), 2),
        "digit": 30,
        "end": 19,
    }
    assert {kind: told["far"] for kind, told in found.items() if told["far"]} == {"operand": 2}
    assert found["operand"]["kl"] == pytest.approx(math.expm1(-2) + 2)
    assert found["digit"]["kl"] == 0


def test_a_resumed_run_has_each_step_once(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    folders = [tmp_path / "exp_001", tmp_path / "exp_002"]
    for folder, steps in zip(folders, ((1, 2, 3), (3, 4)), strict=True):
        folder.mkdir()
        for step in steps:
            (folder / f"train_data_step{step}.jsonl").touch()
    found = sorted(benchmark.runs.step_files(folders))
    assert [f"{file.parent.name}/{file.stem[-1]}" for file in found] == [
        *("exp_001/1", "exp_001/2", "exp_002/3", "exp_002/4")
    ]
