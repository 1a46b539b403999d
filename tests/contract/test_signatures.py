"""What patches and subclasses rely on, read in the sources: nothing needs to be importable."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.doctor.installation import relied_on
from nemo_rl_ext.patches.upstream import Upstream, compare_source
from nemo_rl_ext.workers import logprobs
from support.sources import parameters, source

MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
RELIED_ON = [
    pytest.param(upstream, id=f"{patch}-{upstream.name}-{upstream.module.rpartition('.')[2]}")
    for patch, upstream in relied_on()
]


def file_of(module: str, root: Path) -> Path:
    return root.joinpath(*module.split(".")).with_suffix(".py")


@pytest.mark.parametrize("upstream", RELIED_ON)
def test_upstream_has_what_a_patch_relies_on(upstream: Upstream) -> None:
    compare_source(str(source("NEMO_RL_SRC") / "nemo_rl"), upstream)


def test_upstreams_log_probabilities_take_what_ours_take() -> None:
    compare_source(str(source("NEMO_RL_SRC") / "nemo_rl"), logprobs.UPSTREAM)
    ours = ", ".join(inspect.signature(logprobs.FusedLogprob.forward).parameters)
    assert ours == str(logprobs.UPSTREAM.parameters).replace("=...", "")


def tree_of(module: str) -> ast.Module:
    """NeMo RL's module of this name, read."""
    return ast.parse(file_of(module, source("NEMO_RL_SRC")).read_text(encoding="utf-8"))


def calls(tree: ast.Module, function: str) -> list[tuple[int, str]]:
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    found = []
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append((node.lineno, node.func.id))
        elif isinstance(node, ast.Assert):
            found.append((node.lineno, f"assert {ast.unparse(node.test)}"))
    return sorted(found)


def test_the_cache_is_announced_after_the_guards_and_before_the_workers() -> None:
    order = calls(tree_of("nemo_rl.algorithms.grpo"), "setup")
    announced = [line for line, what in order if what == "configure_vllm_for_router_replay"]
    guards = [line for line, what in order if "precision'] == 'fp8'" in what]
    made = [line for line, what in order if what == "VllmGeneration"]
    assert len(announced) == 1
    assert guards
    assert max(guards) < announced[0]
    assert any(line > announced[0] for line in made)


def test_the_refit_lifecycle_serves_all_full_transports() -> None:
    text = file_of("nemo_rl.models.generation.vllm.vllm_backend", source("NEMO_RL_SRC")).read_text(
        encoding="utf-8"
    )
    for transport in ("ipc", "collective", "nccl_reshard"):
        assert f'self._weight_update_lifecycle("{transport}")' in text


@pytest.mark.parametrize("module", ["vllm_worker", "vllm_worker_async"])
def test_the_parameters_of_a_rollout_are_built_with_keywords(module: str) -> None:
    tree = ast.walk(tree_of(f"nemo_rl.models.generation.vllm.{module}"))
    found = [n for n in tree if isinstance(n, ast.Call)]
    built = [n for n in found if ast.unparse(n.func) == "self._build_sampling_params"]
    assert built and not any(call.args for call in built)


def test_every_loop_calls_the_batch_hook_and_logs_what_it_returns() -> None:
    name = "compute_and_apply_seq_logprob_error_masking"
    root = source("NEMO_RL_SRC") / "nemo_rl" / "algorithms"
    for file, times in (("grpo.py", 3), ("grpo_sync.py", 2), ("single_controller.py", 2)):
        assert (root / file).read_text(encoding="utf-8").count(name) == times, file
    assert (root / "grpo.py").read_text(encoding="utf-8").count(
        "metrics.update(seq_logprob_error_metrics)"
    ) == 2


def test_every_driver_of_upstreams_is_known_and_makes_its_config_before_ray() -> None:
    examples = source("NEMO_RL_SRC") / "examples"
    known = {script: driver for driver in DRIVERS.values() for script in driver.scripts}
    found = {str(file.relative_to(examples)) for file in examples.rglob("run_*.py")}
    others = {"run_rm.py", "run_xtoken_off_policy_distillation.py", "run_eval.py"}
    assert found - others == set(known)  # fp8rl serves nothing of these
    for script, driver in known.items():
        tree = ast.parse((examples / script).read_text(encoding="utf-8"))
        imports = {
            alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if "main" in imports:  # run_vlm_sft.py runs run_sft.py
            assert imports["main"] == "run_sft"
            continue
        assert driver.module.startswith(str(imports["MasterConfig"])), script
        called = {what: line for line, what in calls(tree, "main")}
        assert called["load_config"] < called["MasterConfig"] < called["init_ray"], script


def test_every_class_of_a_drivers_config_is_known() -> None:
    root = source("NEMO_RL_SRC")
    found = {
        ".".join(file.relative_to(root).with_suffix("").parts)
        for file in (root / "nemo_rl").rglob("*.py")
        if "\nclass MasterConfig(" in file.read_text(encoding="utf-8")
    }
    others = {
        "nemo_rl.algorithms.rm",
        "nemo_rl.algorithms.xtoken_off_policy_distillation",
        "nemo_rl.evals.eval",
    }
    assert found - others == {driver.module for driver in DRIVERS.values()}


def test_bridge_takes_a_list_of_pre_wrap_hooks() -> None:
    bridge = source("MEGATRON_BRIDGE_SRC") / "src"
    file = file_of("megatron.bridge.models.model_provider", bridge)
    found = parameters(file, "get_model")
    assert found is not None
    assert "pre_wrap_hook" in found
    assert parameters(file, "ModelProviderMixin.register_pre_wrap_hook") is not None


def test_the_worker_builds_every_model_in_its_constructor() -> None:
    """``Fp8Training`` holds its region open around the constructor, and nowhere else."""
    tree = tree_of(MEGATRON_WORKER)
    builders = {
        "handle_model_import",
        "setup_model_and_optimizer",
        "setup_reference_model_state",
    }  # and build_inference_model, of rollouts by Megatron itself
    called = {
        (function.name, call.func.id)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call.func.id in builders
    }
    assert called == {("__init__", builder) for builder in builders}


def test_the_worker_resets_the_peak_of_memory_where_ours_looks_first() -> None:
    """Elsewhere in a call ``KeptCodes`` would not see what it needs."""
    tree = tree_of(MEGATRON_WORKER)
    resets = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Attribute) and call.attr.startswith("reset_")
        if "memory_stats" in call.attr
    }
    assert resets == {"_log_gpu_mem"}


def test_a_batch_tells_the_sizes_of_its_micro_batches() -> None:
    """By other names ``largest_micro_batch`` would take packed ones for rows of one length."""
    written = {
        ast.unparse(target)
        for node in ast.walk(tree_of("nemo_rl.distributed.batched_data_dict"))
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    for name in ("micro_batch_lengths", "micro_batch_indices"):
        assert {f"self.{name}", f"shard.{name}", f"batch.{name}"} <= written


@pytest.mark.parametrize(
    "name", ["grpo", "grpo_sync", "single_controller", "ppo", "distillation", "sft", "dpo"]
)
def test_every_loop_logs_its_steps_where_plugins_hear_of_them(name: str) -> None:
    """In the call with prefix ``train`` (``patches/step_finished.py``)."""
    calls = [
        call
        for call in ast.walk(tree_of(f"nemo_rl.algorithms.{name}"))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "log_metrics"
        for keyword in call.keywords
        if keyword.arg == "prefix" and getattr(keyword.value, "value", None) == "train"
    ]
    assert {ast.unparse(call.args[0]) for call in calls} & {"metrics", "step_metrics"}


def test_megatron_lm_has_the_norm_of_queries_that_is_left_out() -> None:
    core = source("MEGATRON_LM_SRC") / "megatron" / "core"
    file = core / "transformer" / "mla_qk_norm_config.py"
    name = "QKNormConfigResolver._mla_fused_linear_or_default"
    assert parameters(file, name) == ("self", "module_spec", "module_name")
    text = file.read_text(encoding="utf-8")
    assert "self.linear_impl" in text and "'linear_q_proj'" in text.replace('"', "'")
