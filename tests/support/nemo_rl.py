"""Stand-ins for the parts of NeMo RL's config and of its vLLM workers that a test calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from support.engine import Engine  # sets what vLLM reads at import


class Section(BaseModel, extra="allow"):
    """A section that is a model, as some of upstream's are."""


class MasterConfig(BaseModel, extra="allow"):
    """As upstream's: sections are plain, but the loss is a model."""

    policy: dict[str, Any]
    loss_fn: Section


def planned(policy: dict[str, Any], driver: str = "grpo") -> dict[str, Any]:
    """Return section ``policy`` with the plan that the driver makes of its blocks."""
    from nemo_rl_ext.config.drivers import DRIVERS, PLAN
    from nemo_rl_ext.config.keys import Sections
    from nemo_rl_ext.config.merge import read

    loss = {"use_importance_sampling_correction": True}
    plan = read(Sections({"policy": policy, "loss_fn": loss}, DRIVERS[driver]))
    return policy if plan is None else {**policy, PLAN: plan.to_dict()}


def write_checkout(folder: Path) -> Path:
    """Write a stand-in of ``NEMO_RL_SRC`` that has what our patches rely on, and nothing else."""
    from nemo_rl_ext.doctor.installation import relied_on

    modules: dict[str, dict[str, Any]] = {}
    for _, upstream in relied_on():
        members = modules.setdefault(upstream.module, {})
        *classes, name = upstream.name.split(".")
        for each in classes:
            if not isinstance(members.get(each), dict):
                members[each] = {}
            members = members[each]
        members.setdefault(name, upstream.parameters)
    for module, members in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(_definitions(members, "")), encoding="utf-8")
    version = 'MAJOR = 0\nMINOR = 6\nPATCH = 0\nPRE_RELEASE = "rc1"\n'
    (folder / "nemo_rl" / "package_info.py").write_text(version, encoding="utf-8")
    return folder


def _definitions(members: dict[str, Any], indent: str) -> Iterator[str]:
    for name, value in members.items():
        if isinstance(value, dict):
            yield f"{indent}class {name}:"
            yield from _definitions(value, indent + "    ")
        elif value is None:
            yield f"{indent}{name} = None"
        else:
            yield f"{indent}def {name}({value}): ..."


def extension(engine: Engine) -> Any:
    """Our worker extension over the engine's worker, as vLLM mixes it in."""
    from nemo_rl_ext.workers.vllm_extension import Fp8VllmWorkerExtension

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    mixed: Any = Fp8VllmWorkerExtension()
    mixed.model_runner = worker.model_runner
    mixed.model_config = worker.model_config
    mixed.device = worker.device
    return mixed


def put(config: dict[str, Any], path: str, new: Any, *, out: bool = False) -> None:
    """Set a copy of a value by its dotted path, making sections; ``out``: take the key out."""
    *sections, key = path.split(".")
    inner: Any = config
    for section in sections:
        inner = inner[int(section)] if section.isdigit() else inner.setdefault(section, {})
    if out:
        inner.pop(key, None)
    else:
        inner[key] = copy.deepcopy(new)
