"""Real NeMo RL on a CPU: test_nemo_rl.py runs this file in a process that can import it."""

from __future__ import annotations

import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nemo_rl.algorithms.grpo", exc_type=ImportError)

from nemo_rl.algorithms import grpo, loss
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.single_controller_utils.utils import aggregate_step_metrics
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.generation.vllm.quantization.fp8_train_utils import get_vllm_qkv_scale_names
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils import config as nemo_config
from omegaconf import OmegaConf

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.kv_scales import scale_names
from nemo_rl_ext import GRPOConfig, GRPOLoss
from nemo_rl_ext.config.drivers import PLAN
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.driver.batch_correction import WEIGHTS, BatchCorrection
from nemo_rl_ext.driver.mismatch_guard import MismatchGuard
from nemo_rl_ext.patch_finder import PATCHES, install
from nemo_rl_ext.patches import worker_classes
from nemo_rl_ext.patches.upstream import require_patches
from support.sources import source

finder = install()
finder.take_up()


@pytest.mark.parametrize("module", sorted(PATCHES))
def test_every_patch_is_applied(module: str) -> None:
    __import__(module)
    assert not finder.failures
    assert {(module, patch) for patch in PATCHES[module]} <= finder.applied


def test_what_patches_and_subclasses_rely_on_is_there() -> None:
    require_patches(finder, "policy.megatron_cfg.fp8rl")


# --- config ---


def master_config(
    name: str, overrides: list[str], keys: dict[str, Any] | None, cls: Any = None
) -> Any:
    """The config as a driver makes it, of an upstream YAML and our keys."""
    nemo_config.register_omegaconf_resolvers()
    file = source("NEMO_RL_SRC") / "examples" / "configs" / name
    value = nemo_config.load_config(str(file))
    if keys is not None:
        value = nemo_config.merge_with_override(value, OmegaConf.create(keys))
    if overrides:
        value = nemo_config.parse_hydra_overrides(value, overrides)
    return (cls or grpo.MasterConfig)(**OmegaConf.to_container(value, resolve=True))


def block(**recipe: Any) -> dict[str, Any]:
    return {
        "fp8rl": recipe,
        "policy": {
            "megatron_cfg": {"fp8rl": "${fp8rl}"},
            "generation": {"vllm_cfg": {"fp8rl": "${fp8rl}"}},
        },
        "loss_fn": {"fp8rl": "${fp8rl}"},
    }


# --- loss ---

ROWS, LENGTH = 6, 12


def batch(seed: int = 0, gap: float = 0.1) -> BatchedDataDict:
    """A batch as the drivers make it: column 0 of every tensor belongs to the prompt."""
    noise = torch.Generator().manual_seed(seed)

    def random(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=noise)

    previous = -1.0 + random(0.3)
    token_mask = (torch.rand(ROWS, LENGTH, generator=noise) > 0.3).float()
    token_mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.ones(ROWS, LENGTH, dtype=torch.long),
            "token_mask": token_mask,
            "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
            "prev_logprobs": previous,
            "generation_logprobs": previous + random(gap),
            "reference_policy_logprobs": previous + random(0.2),
            "advantages": random(1.0),
        }
    )


def current(data: BatchedDataDict) -> torch.Tensor:
    noise = torch.Generator().manual_seed(9)
    start = data["prev_logprobs"][:, 1:]
    return (start + 0.2 * torch.randn(start.shape, generator=noise)).requires_grad_()


def totals(data: BatchedDataDict) -> dict[str, torch.Tensor]:
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": tokens}


def plan(section: dict[str, Any]) -> dict[str, Any]:
    """The plan of a run whose block has this ``importance_sampling``."""
    recipe = Recipe.from_dict({"importance_sampling": section})
    return RunPlan(driver="grpo", recipe=recipe, sections=("loss_fn",)).to_dict()


def make(section: dict[str, Any] | None, **settings: Any) -> Any:
    keys = {"reference_policy_kl_penalty": 0.0, **settings}
    if section is not None:
        keys[PLAN] = plan(section)
    return loss.ClippedPGLossFn(ClippedPGLossConfig(**keys))


def test_without_the_key_the_loss_is_upstreams_class() -> None:
    finder.run.correction = None
    made = make(None, use_importance_sampling_correction=True)
    assert type(made) is ClippedPGLossFn
    assert made.use_importance_sampling_correction
    assert finder.run.correction is None


@pytest.mark.parametrize(
    "section",
    [
        {"level": "sequence", "mode": "clip", "low": 0.5, "high": 1.5, "self_normalize": True},
        {"level": "geometric", "rejection": {"level": "token", "low": 0.9, "high": 1.1}},
    ],
)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
            {"loss_mode": "gspo", "loss_aggregation": "sequence"},
        ),
        ({"use_cispo": True}, {"loss_mode": "cispo"}),
    ],
)
def test_batches_that_the_hook_corrects_have_our_loss_in_each_of_upstreams_forms(
    theirs: dict[str, Any], ours: dict[str, Any], section: dict[str, Any]
) -> None:
    """Two implementations agree, weighted and after rejection, on values and gradients."""
    data, clean = batch(gap=0.2), batch(gap=0.2)
    for b in (data, clean):  # GSPO has one advantage for each sequence
        b["advantages"] = b["advantages"][:, :1].expand(ROWS, LENGTH).clone()
    bounds = {"ratio_clip_min": 0.02, "ratio_clip_max": 0.03}
    finder.run.correction = None
    fn = make(section, **theirs, **bounds)
    told = grpo.compute_and_apply_seq_logprob_error_masking(
        train_data=data, rewards=torch.ones(ROWS), seq_logprob_error_threshold=None
    )
    assert "max_seq_mult_prob_error" in told and WEIGHTS in data.slice(0, 2)
    if "high" in section.get("rejection", {}):
        assert told["fp8rl/rejected_share"] > 0
    logprobs, mine = current(data), current(clean)
    value, _ = fn(logprobs, data, **totals(data))
    value.backward()
    config = GRPOConfig(clip_low=0.02, clip_high=0.03, **ours)
    expected, metrics = GRPOLoss(config, fn.plan.recipe.importance_sampling)(
        mine,
        clean["prev_logprobs"][:, 1:],
        clean["generation_logprobs"][:, 1:],
        clean["advantages"][:, 1:],
        clean["token_mask"][:, 1:] * clean["sample_mask"][:, None],
    )
    expected.backward()
    assert metrics["clip_low_share"] + metrics["clip_high_share"] > 0
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(logprobs.grad, mine.grad, rtol=2e-6, atol=1e-7)
    finder.run.correction = None


def test_truncated_weights_are_upstreams_tis() -> None:
    data = batch(gap=0.5)
    ours = make({"mode": "truncate", "high": 1.2}, reference_policy_kl_penalty=0.1)
    theirs = make(
        None,
        reference_policy_kl_penalty=0.1,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.2,
    )
    a, b = current(data), current(data)
    first, _ = ours(a, data, **totals(data))
    second, _ = theirs(b, data, **totals(data))
    first.backward()
    second.backward()
    torch.testing.assert_close(first, second, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(a.grad, b.grad, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{"force_on_policy_ratio": True}, {"disable_ppo_ratio": True}])
def test_every_form_of_upstreams_loss_is_corrected(settings: dict[str, Any]) -> None:
    """Weight 1 is upstream's own value; with equal policies the weights are 1."""
    data = batch(gap=0.0)
    value, _ = make({}, **settings)(current(data), data, **totals(data))
    plain, _ = make(None, **settings)(current(data), data, **totals(data))
    if settings.get("force_on_policy_ratio"):  # there the trainer's policy is the current one
        assert value != plain
    else:
        torch.testing.assert_close(value, plain)


def test_an_objective_without_a_policy_gradient_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NeMo RL 0.8.0's loss can have one."""
    monkeypatch.setattr(ClippedPGLossFn, "opd_full", object(), raising=False)
    with pytest.raises(UnsupportedError, match=r"'loss_fn.fp8rl'.* on_policy_distillation_full"):
        make({})


def test_packed_sequences_one_by_one_add_up_to_the_batch() -> None:
    data = batch()
    fn = make({"level": "geometric", "high": 1.1})
    whole, metrics = fn(current(data), data, **totals(data))
    parts, sums = torch.zeros(()), 0.0
    for row in range(ROWS):
        piece = data.slice(row, row + 1)
        value, found = fn(current(data)[row : row + 1], piece, **totals(data))
        parts = parts + value
        sums += found["fp8rl_is_weight_mean"]
    torch.testing.assert_close(parts, whole)
    assert sums == pytest.approx(metrics["fp8rl_is_weight_mean"])


def test_upstreams_threshold_still_masks() -> None:
    finder.run.correction = None
    data = batch(gap=0.3)
    before = grpo.compute_and_apply_seq_logprob_error_masking.__wrapped__(
        batch(gap=0.3), torch.ones(ROWS), 1.2
    )
    after = grpo.compute_and_apply_seq_logprob_error_masking(data, torch.ones(ROWS), 1.2)
    assert after == before


def test_the_loss_travels() -> None:
    fn, data = make({"high": 1.3}), batch()
    first, _ = fn(current(data), data, **totals(data))
    clone = pickle.loads(pickle.dumps(fn))
    assert clone(current(data), data, **totals(data))[0] == first


# --- skipped steps ---


def test_a_skipped_step_runs_without_the_optimizer_in_every_epoch() -> None:
    """`Policy.train` itself; the worker group records what the workers would get."""
    asked: list[bool] = []

    class Workers:
        def run_all_workers_sharded_data(self, method: str, **given: Any) -> None:
            asked.append(given["common_kwargs"]["eval_mode"])

        def get_all_worker_results(self, futures: None) -> list[dict[str, Any]]:
            return [{"global_loss": torch.zeros(1), "grad_norm": None, "all_mb_metrics": {}}]

    policy = object.__new__(Policy)
    policy.cfg = {"train_global_batch_size": 4, "train_micro_batch_size": 1}
    policy.flops_tracker = None
    policy.worker_group = Workers()
    policy._shard_for_train = lambda data, size: [data]
    policy._report_sharded_payload = lambda data, name: None
    finder.run.correction = None
    fn = make({"rejection": {"level": "sequence", "high": 1e-9}})
    data = batch()
    metrics = grpo.compute_and_apply_seq_logprob_error_masking(data, torch.ones(ROWS), None)
    assert metrics["fp8rl/step_skipped"] == 1.0
    assert policy.train(data, fn)["grad_norm"].tolist() == [0.0]
    policy.train(data, fn)  # PPO trains several epochs on a batch
    run = finder.run.correction
    assert run is not None
    run.settings = Recipe().importance_sampling
    grpo.compute_and_apply_seq_logprob_error_masking(batch(), torch.ones(ROWS), None)
    policy.train(data, fn)
    assert asked == [True, True, False]
    finder.run.correction = None


def test_batches_that_upstreams_threshold_empties_reach_the_guards_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = MismatchGuard(GuardConfig(fallback_after=1))
    run = BatchCorrection(Recipe().importance_sampling, guard)
    monkeypatch.setattr(finder.run, "correction", run)
    metrics = grpo.compute_and_apply_seq_logprob_error_masking(batch(), torch.ones(ROWS), 1.0)
    assert metrics["num_masked_seqs"] == ROWS - 1  # one was out before
    assert (metrics["fp8rl/guard_level"], metrics["fp8rl/step_skipped"]) == (2.0, 1.0)
    assert run.skips
    with pytest.raises(UnsupportedError, match="2 steps in a row were left out"):
        grpo.compute_and_apply_seq_logprob_error_masking(batch(), torch.ones(ROWS), 1.0)


# --- steps in pieces ---


def test_a_step_in_pieces_ends_without_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TQPolicy` itself; the worker group records what the workers would get."""
    from nemo_rl.models.policy.tq_policy import TQPolicy

    asked: list[str] = []

    class Workers:
        def run_all_workers_single_data(self, method: str) -> list[Any]:
            asked.append(method)
            if method.startswith("abort"):
                return []
            ones = torch.ones(1)
            return [{"global_loss": ones, "grad_norm": ones, "all_mb_metrics": {}}]

    monkeypatch.setattr("ray.get", lambda futures: futures)
    policy = object.__new__(TQPolicy)
    policy.flops_tracker = None
    policy.worker_group = Workers()
    run = BatchCorrection(Recipe().importance_sampling, in_pieces=True)
    monkeypatch.setattr(finder.run, "correction", run)
    told = {}
    for bound in (1e-9, 10.0):  # all is rejected, nothing is
        rejection = {"level": "sequence", "high": bound}
        recipe = Recipe.from_dict({"importance_sampling": {"rejection": rejection}})
        run.settings = recipe.importance_sampling
        run.correct(batch())
        told[bound] = aggregate_step_metrics(policy.finish_train_step())
    left_out, trained = told.values()
    assert (left_out["loss"], trained["loss"]) == (0.0, 1.0)
    assert (left_out["fp8rl/step_skipped"], trained["fp8rl/step_skipped"]) == (1.0, 0.0)
    for metrics in told.values():
        assert metrics["fp8rl/token_mult_prob_error"] >= 1
    assert asked == ["abort_train_step_presharded", "finish_train_step_presharded"]


def test_an_infinite_threshold_is_none_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the single controller's config; upstream would drop NaN by it, unseen by us."""
    monkeypatch.setattr(finder.run, "correction", None)
    data = batch()
    data["prev_logprobs"][0, 1] = torch.nan
    before = data["sample_mask"].clone()
    mask, rewards = grpo.compute_and_apply_seq_logprob_error_masking, torch.ones(ROWS)
    mask(data, rewards, math.inf)
    mask(train_data=data, rewards=rewards, seq_logprob_error_threshold=math.inf)
    assert torch.equal(data["sample_mask"], before)


def test_ray_can_pickle_the_actor_whose_module_has_our_function() -> None:
    """Its class goes by value, with what its module imported, and a proxy there could not go."""
    from nemo_rl.algorithms import single_controller
    from ray import cloudpickle

    hook = "compute_and_apply_seq_logprob_error_masking"
    assert hasattr(getattr(single_controller, hook), "__wrapped__"), "ours is there"
    actor = single_controller.SingleControllerActor.__ray_metadata__.modified_class
    made = cloudpickle.loads(cloudpickle.dumps(actor))
    stage = inspect.unwrap(made._advantage_stage)
    assert stage.__globals__[hook] is getattr(single_controller, hook), "by its name"


# --- names ---


def test_kv_scales_have_upstreams_names() -> None:
    theirs = {name for layer in range(3) for name in get_vllm_qkv_scale_names(layer).values()}
    assert theirs == set(scale_names(3))


# --- KV scales of asynchronous engines ---


class WorkerGroup:
    """Stands for the Megatron workers: says what it was given."""

    def __init__(self) -> None:
        self.shards: Any = None

    def run_all_workers_sharded_data(self, method: str, data: Any, **kwargs: Any) -> Any:
        assert method == "calibrate_qkv_fp8_scales"
        assert kwargs["common_kwargs"]["include_q"]
        self.shards = data

    def get_all_worker_results(self, futures: Any) -> Any:
        return [{"layers": {"model.layers.0.self_attn.k_scale": 0.5}, "outgrown": []}]

    def run_all_workers_single_data(self, method: str, **kwargs: Any) -> Any:
        return method, kwargs["kv_scales"]


@pytest.mark.parametrize("batching", ["plain", "sequence_packing", "dynamic_batching"])
def test_asynchronous_engines_get_scales_and_upstream_shards_the_first_batch(
    batching: str, tmp_path: Path
) -> None:
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    value = master_config("grpo_math_1B.yaml", [], None).policy
    value["model_name"] = str(tmp_path)
    value["generation"]["vllm_cfg"]["async_engine"] = True
    value[PLAN] = RunPlan(
        driver="grpo", recipe=Recipe(), sections=("loss_fn",), megatron=True, kv_scales="trainer"
    ).to_dict()
    policy = object.__new__(Policy)
    policy.cfg, policy.debug_payload_metrics = value, False
    policy.sharding_annotations = NamedSharding(
        layout=torch.arange(2).reshape(1, 2, 1, 1).numpy(),
        names=["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"],
    )
    policy.use_sequence_packing = batching == "sequence_packing"
    policy.use_dynamic_batches = batching == "dynamic_batching"
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    policy.sequence_packing_args = {
        **keys,
        "algorithm": value["sequence_packing"]["algorithm"],
        "sequence_length_pad_multiple": value["make_sequence_length_divisible_by"],
    }
    policy.dynamic_batching_args = {**keys, "sequence_length_round": 64}
    policy.worker_group = WorkerGroup()
    method, scales = policy.broadcast_weights_for_collective(buffer_size_bytes=1)
    assert method == "broadcast_weights_for_collective"
    assert scales == {"model.layers.0.self_attn.k_scale": 0.5}
    assert [shard.size for shard in policy.worker_group.shards] == [4, 4]


# --- worker classes ---

VLLM = "nemo_rl.models.generation.vllm"
MEGATRON_CLASS = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def test_workers_are_of_our_classes_where_a_config_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.models.generation.vllm import vllm_generation
    from nemo_rl.models.policy import lm_policy

    config = master_config("grpo_math_1B_megatron.yaml", ["++fp8rl.kv_cache.dtype=auto"], block())
    plain = master_config("grpo_math_1B_megatron.yaml", [], None)
    chosen = []
    for name, default, section in (
        ("generation", f"{VLLM}.vllm_worker.VllmGenerationWorker", "generation"),
        ("generation", f"{VLLM}.vllm_worker_async.VllmAsyncGenerationWorker", "generation"),
        ("policy", MEGATRON_CLASS, None),
    ):
        module = vllm_generation if name == "generation" else lm_policy
        choose = getattr(module, f"resolve_{name}_worker_cls")
        given = [c.policy[section] if section else c.policy for c in (plain, config)]
        assert choose(default, given[0]) == default
        monkeypatch.setitem(registry.ACTOR_ENVIRONMENT_REGISTRY, default, f"/{default}/python")
        ours = choose(default, given[1])
        assert registry.get_actor_python_env(ours) == f"/{default}/python"
        chosen.append(ours)
    dtensor = MEGATRON_CLASS.replace("megatron", "dtensor").replace("Megatron", "DTensor")
    both = {**block(), "policy": {**block()["policy"], "dtensor_cfg": {"fp8rl": "${fp8rl}"}}}
    automodel = dtensor.replace("_worker", "_worker_v2") + "V2"  # upstream's default
    for name in (dtensor, automodel):
        monkeypatch.setitem(registry.ACTOR_ENVIRONMENT_REGISTRY, name, "/python")
        more = [] if name == automodel else ["policy.dtensor_cfg._v2=false"]
        rollouts = master_config("grpo_math_1B.yaml", more, block())
        assert lm_policy.resolve_policy_worker_cls(name, rollouts.policy) == name
        trained = master_config("grpo_math_1B.yaml", more, both)
        chosen.append(lm_policy.resolve_policy_worker_cls(name, trained.policy))
    assert chosen == list(worker_classes.STANDS_FOR.values())[:-1]  # the last one is 0.8.0's


def test_a_subclass_runs_in_the_virtual_environment_of_the_class_it_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naively upstream would make another, without this distribution."""
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.utils import venvs

    made: list[tuple[str, str]] = []

    def create(python: str, name: str) -> str:
        made.append((python, name))
        return f"/venvs/{name}/bin/python"

    monkeypatch.setattr(venvs, "create_local_venv_on_each_node", create)
    monkeypatch.setitem(registry.ACTOR_ENVIRONMENT_REGISTRY, MEGATRON_CLASS, "uv run --extra mcore")
    ours = worker_classes.register(MEGATRON_CLASS)
    assert made == [("uv run --extra mcore", MEGATRON_CLASS)]
    assert registry.get_actor_python_env(ours) == f"/venvs/{MEGATRON_CLASS}/bin/python"
