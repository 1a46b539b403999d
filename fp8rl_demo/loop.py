"""The GRPO loop: generate, logprobs, train, calibrate, refit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fp8rl import PluginManager, Recipe
from fp8rl.errors import CheckpointError
from fp8rl.kv_scales import next_scales, parse_scale_name
from fp8rl.models.folder import RECIPE_FILE, read_tensors
from fp8rl_demo import checkpoint
from fp8rl_demo.batch import TokenBatch, make_batch
from fp8rl_demo.events import EventWriter
from fp8rl_demo.policy import MegatronPolicy
from fp8rl_demo.rollout import VllmRollout
from fp8rl_demo.settings import Precision, Settings, task_of, tokenizer_of, write_model_folder
from fp8rl_demo.tasks import sample_batch
from fp8rl_demo.warm_start import supervised_batch
from nemo_rl_ext.grpo.advantages import group_relative_advantages
from nemo_rl_ext.grpo.importance_sampling import Correction
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss, merge_metrics

MISMATCH = (
    "token_mult_prob_error",
    "capped_prob_error",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "chi_square",
    "ess",
    "ppl_gap",
    "share_low",
    "share_high",
)
_SAMPLES_SHOWN = 8


class GrpoRun:
    """The run of one precision; on a CPU everything random is a function of (seed, step)."""

    def __init__(
        self,
        precision: Precision,
        recipe: Recipe,
        settings: Settings,
        length: int,
        folder: Path,
        events: EventWriter,
    ) -> None:
        self._precision, self._recipe, self._settings = precision, recipe, settings
        self._length, self._folder, self._events = length, folder, events
        self._plugins = PluginManager()
        self._loss = GRPOLoss(GRPOConfig(), recipe.importance_sampling, self._plugins)
        self._tokenizer, self._task = tokenizer_of(settings), task_of(settings)
        self._seconds: dict[str, float] = {}
        self._scales: dict[str, torch.Tensor] = {}
        """KV scales in service."""
        self._outgrown = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal to continue the run."""
        return {
            "precision": self._precision,
            "recipe": self._recipe.to_dict(),
            "settings": self._settings.model_dump(mode="json", exclude={"pretrained"}),
        }

    def run(self, steps: int, warm_start: Path | None, *, resume: bool) -> None:
        """Train until ``steps`` steps are finished.

        Args:
            steps: number of GRPO steps, with those before a resume.
            warm_start: checkpoint folder with the initial weights; None: the pretrained model's.
        """
        self._events("start trainer", 0, steps)
        found = checkpoint.latest(self._folder) if resume else None
        state = checkpoint.load(found, self.identity) if found else None
        start = state.step if state else 0
        model_folder = self._folder / "model"
        write_model_folder(self._settings, model_folder)
        recipe = json.dumps(self._recipe.to_dict())  # for fp8rl export of a checkpoint
        _write_atomically(model_folder / RECIPE_FILE, recipe)
        self._keep_lines_before(start)
        self._policy = MegatronPolicy(self._settings, self._recipe)
        model = state.model if state else _initial_weights(self._settings, warm_start)
        weights = {n: t for n, t in model.items() if parse_scale_name(n) is None}
        self._policy.load(weights)
        if state:
            self._policy.load_optimizer_state(state.trainer["optimizer"])
            self._policy.observer.load_state_dict(state.trainer["observer"])
            self._scales = {n: t for n, t in model.items() if n not in weights}
        else:
            # Nothing has run before the first rollout, so it needs a calibration of its own.
            rows = self._task.train[: min(128, self._settings.sequences)]
            answers = [problem.answer for problem in rows]
            batch = supervised_batch(self._tokenizer, rows, answers, self._length)
            self._policy.logprobs(batch)
        del state, model, weights  # gigabytes
        self._events("start engine", start, steps)
        self._rollout = VllmRollout(
            self._settings,
            self._recipe,
            model_folder,
            stop_ids=self._tokenizer.stop_ids,
            length=self._length,
            seed=self._settings.seed + start,
        )
        try:
            self._write_run_json()
            self._refit()
            if start == 0:
                self._validate(0)
            self._steps(start, steps, model_folder)
        finally:
            self._rollout.close()

    def _steps(self, start: int, steps: int, model_folder: Path) -> None:
        for step in range(start, steps):
            line = self._step(step)
            # Read once: a request that comes while this step is written ends the next one, whose
            # checkpoint is written too.
            stop = self._events.stop_requested
            last = step + 1 == steps or stop
            if last or (step + 1) % self._settings.validation_every == 0:
                line["validation_accuracy"] = self._validate(step + 1)
            self._append("metrics.jsonl", line)
            self._plugins.hook.step_finished(
                step=step, metrics={**line["mismatch"], **line["loss_metrics"]}
            )
            note = f"reward {line['reward']:.2f}  KL {line['mismatch']['kl_k3']:.1e}"
            self._events("steps", step + 1, steps, note)
            every = self._settings.checkpoint_every
            if every and (last or (step + 1) % every == 0):
                self._save(step + 1, model_folder)
            if stop:
                raise KeyboardInterrupt

    def _step(self, step: int) -> dict[str, Any]:
        settings = self._settings
        self._seconds = {}
        problems = sample_batch(
            self._task.train, settings.prompts_per_step, seed=settings.seed, step=step
        )
        rows = [p for p in problems for _ in range(settings.samples_per_prompt)]
        prompts = [self._tokenizer.encode(p.prompt) for p in rows]
        with self._timed("generate"):
            samples = self._rollout.sample(prompts, _request_seeds(settings, step))
        texts = map(self._tokenizer.decode, samples.tokens)
        rewards = torch.tensor([self._task.score(p, t) for p, t in zip(rows, texts, strict=True)])
        groups = torch.arange(len(problems)).repeat_interleave(settings.samples_per_prompt)
        advantages = group_relative_advantages(rewards, groups)
        batch = make_batch(
            prompts,
            samples.tokens,
            samples.logprobs,
            length=self._length,
            pad_id=self._tokenizer.pad_id,
        )
        self._policy.observer.reset()
        with self._timed("logprobs"):
            old = self._policy.logprobs(batch)
        correction = self._loss.correct(batch.rollout_logprobs, old, batch.mask)
        with self._timed("train"):
            ramp = min(1.0, (step + 1) / settings.warmup_steps)
            trained = self._train_on(
                batch, old, advantages, correction, settings.learning_rate * ramp
            )
        trained |= self._policy.clipped()
        self._refit()
        return {
            "step": step,
            "reward": rewards.mean().item(),
            "accuracy": (rewards == 1.0).float().mean().item(),
            "tokens": sum(map(len, samples.tokens)),
            "loss": trained["loss"],
            "mismatch": {key: correction.metrics[key] for key in MISMATCH},
            "loss_metrics": {
                **{k: v for k, v in correction.metrics.items() if k not in MISMATCH},
                **trained,
                "kv_scales_outgrown": float(self._outgrown),
            },
            "seconds": dict(self._seconds),
            "validation_accuracy": None,
        }

    def _train_on(
        self,
        batch: TokenBatch,
        old: torch.Tensor,
        advantages: torch.Tensor,
        correction: Correction,
        learning_rate: float,
    ) -> dict[str, float]:
        settings = self._settings
        # Each minibatch takes some samples of each prompt, so that none is a single group.
        order = torch.arange(len(batch)).view(settings.prompts_per_step, -1).t().reshape(-1)
        batch = batch.rows(order)
        old, advantages, correction = old[order], advantages[order], correction.rows(order)
        size = -(-len(batch) // settings.minibatches)
        parts: list[dict[str, float]] = []
        norms: list[float] = []
        for begin in range(0, len(batch), size):
            mini = slice(begin, begin + size)
            data, fixed = batch.rows(mini), correction.rows(mini)
            normalizer = self._loss.normalizer(fixed.mask)

            def loss(logprobs: torch.Tensor, rows: slice) -> torch.Tensor:
                value, metrics = self._loss(
                    logprobs,
                    old[mini][rows],  # noqa: B023 - called before the next iteration
                    data.rollout_logprobs[rows],  # noqa: B023
                    advantages[mini][rows],  # noqa: B023
                    data.mask[rows],  # noqa: B023
                    correction=fixed.rows(rows),  # noqa: B023
                    normalizer=max(normalizer, 1),  # noqa: B023
                )
                parts.append(metrics)
                return value

            norms.append(self._policy.step(data, loss, learning_rate)["grad_norm"])
        return {**merge_metrics(parts), "grad_norm": sum(norms) / len(norms)}

    def _calibrate(self) -> None:
        if not self._recipe.kv_cache.has_scales:
            return
        amax = self._policy.observer.amax()
        self._scales, outgrown = next_scales(self._scales, amax, self._recipe.kv_cache)
        self._outgrown = len(outgrown)

    def _refit(self) -> None:
        with self._timed("calibrate"):
            self._calibrate()
        with self._timed("refit"):
            self._rollout.refit(chain(self._policy.export(), self._scales.items()))
        self._policy.refitted(self._scales)

    def _validate(self, step: int) -> float:
        problems = self._task.validation[: self._settings.validation_size]
        prompts = [self._tokenizer.encode(p.prompt) for p in problems]
        answers = [self._tokenizer.decode(ids) for ids in self._rollout.greedy(prompts).tokens]
        right = [self._task.score(p, a) == 1.0 for p, a in zip(problems, answers, strict=True)]
        shown = list(zip(problems, answers, right, strict=True))[:_SAMPLES_SHOWN]
        for problem, answer, is_right in shown:
            row = {"step": step, "prompt": problem.prompt, "answer": problem.answer}
            self._append("samples.jsonl", {**row, "completion": answer, "right": is_right})
        accuracy = sum(right) / len(right)
        self._append("validation.jsonl", {"step": step, "accuracy": accuracy})
        return accuracy

    def _save(self, step: int, model_folder: Path) -> None:
        trainer = {
            "optimizer": self._policy.optimizer_state(),
            "observer": self._policy.observer.state_dict(),
        }
        # With the KV scales, vLLM can serve the folder as it is.
        model = {**dict(self._policy.export()), **self._scales}
        checkpoint.save(self._folder, step, model, trainer, self.identity, model_folder)

    def _write_run_json(self) -> None:
        from importlib.metadata import version

        import vllm  # not by version(): its distribution has several names

        rows = self._policy.conversion.policy.report()
        body = {
            **self.identity,
            "pretrained": self._settings.pretrained,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {
                "vllm": vllm.__version__,
                **{n: version(n) for n in ("fp8rl", "torch", "megatron-core", "transformers")},
            },
            "pins": [{"name": r.name, "precision": r.precision, "reason": r.reason} for r in rows],
        }
        _write_atomically(self._folder / "run.json", json.dumps(body, indent=2))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _keep_lines_before(self, start: int) -> None:
        """Delete the lines that a killed run wrote after its last checkpoint."""
        # A step's line has the number of the step, a validation's the number of finished steps.
        limits = {"metrics.jsonl": start, "validation.jsonl": start + 1, "samples.jsonl": start + 1}
        for name, limit in limits.items():
            path = self._folder / name
            kept = []
            if start and path.is_file():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                for number, line in enumerate(lines, start=1):
                    try:
                        step = json.loads(line)["step"]
                        before = step < limit
                    except (ValueError, TypeError, LookupError):
                        if number == len(lines):
                            break  # cut off by the kill
                        raise CheckpointError(
                            f"Line {number} of {path} is damaged; delete that line to "
                            "continue without it."
                        ) from None
                    if before:
                        kept.append(line + "\n")
            _write_atomically(path, "".join(kept))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin


def _initial_weights(settings: Settings, warm_start: Path | None) -> dict[str, torch.Tensor]:
    if settings.pretrained is None:
        assert warm_start is not None
        return checkpoint.load(warm_start).model
    return dict(read_tensors(Path(settings.pretrained)))


def _request_seeds(settings: Settings, step: int) -> list[int]:
    generator = torch.Generator().manual_seed((settings.seed << 32) + step)
    return torch.randint(2**31, (settings.sequences,), generator=generator).tolist()


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
