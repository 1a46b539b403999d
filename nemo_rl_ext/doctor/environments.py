"""Ask every interpreter of a NeMo RL on this node whether it has fp8rl, and the same as the driver.

NeMo RL makes one virtual environment for each class of actors (``nemo_rl/utils/venvs.py``), and in
its container a command ``python-<class>`` for each (``nemo_rl/utils/prefetch_venvs.py``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8rl.errors import UnsupportedError
from fp8rl.plugins.adapters import Diagnosis, Section
from nemo_rl_ext.doctor.installation import find_package, installed_package, version
from nemo_rl_ext.patches.upstream import KNOWN

VENVS = "NEMO_RL_VENV_DIR"
"""NVIDIA's images set it."""
ONE_FOR_ALL = "NEMO_RL_PY_EXECUTABLES_SYSTEM"
PAGE = "docs/nemo_rl_install.md"

_DRIVER = "driver"
_VLLM = ("VllmGenerationWorker", "VllmAsyncGenerationWorker")
_MEGATRON = ("MegatronPolicyWorker",)
_DTENSOR = ("DTensorPolicyWorker", "DTensorPolicyWorkerV2", "AutomodelPolicyWorker")
_NEED = (_DRIVER, *_VLLM, *_MEGATRON, *_DTENSOR)
"""Where code of ours runs; DTensor workers get the corrected loss. Other actors only hold handles
of these."""
_ANEW = "have NeMo RL make it anew with NRL_FORCE_REBUILD_VENVS=true"
_LIMIT = 120.0
"""Seconds that an interpreter may take: a cold disk and twenty of them at once."""


@dataclass(frozen=True)
class Environment:
    """An interpreter, and what it answered."""

    name: str
    """``driver``, or the last part of the class's name."""
    python: str
    answer: Mapping[str, Any] | None = None
    silence: str = ""
    """Why there is no answer."""

    @property
    def needed(self) -> bool:
        if os.environ.get(ONE_FOR_ALL) == "1" and self.name in (*_VLLM, *_MEGATRON):
            return False  # these run in the driver's environment
        return self.name in _NEED

    @property
    def problem(self) -> str | None:
        """Why fp8rl cannot work here, and the remedy; None if it can."""
        where = f"{self.name} ('{self.python}')"
        if self.answer is None:
            return f"{where} does not answer: {self.silence}; {_ANEW}, or remove its folder."
        for module, error in self.answer["errors"].items():
            if error is not None:
                return f"{where} cannot import {module} ({error}); {_remedy(self.python)}."
        group = {_DRIVER: "torch.backends", **dict.fromkeys(_VLLM, "vllm.general_plugins")}
        wanted = group.get(self.name)
        if wanted is not None and wanted not in self.answer["entry points"]:
            return (
                f"{where} has fp8rl in '{self.answer['folder']}', but not its entry "
                f"point in '{wanted}', because no fp8rl-*.dist-info is on its path; "
                f"{_remedy(self.python)}."
            )
        return None


def examine_environments(source: Path | None) -> Diagnosis:
    """Describe fp8rl in the driver's and each worker's environment of this node.

    Args:
        source: checkout of NeMo RL, which has the environments in ``venvs`` where
            ``NEMO_RL_VENV_DIR`` is not set; None for the installed one.
    """
    package = find_package(source) if source is not None else installed_package()
    folders = _folders(package)
    found = _asked(_interpreters(folders))
    if package is None and len(found) == 1:
        raise UnsupportedError(
            f"No NeMo RL is installed here, and there is no environment of its workers; run this "
            f"in its driver's environment, give --source with a checkout of it, or set {VENVS}."
        )
    driver = found[0]
    problems = [e.problem for e in found if e.needed and e.problem is not None]
    good = [e for e in found if e.needed and e.problem is None]
    problems += [_difference(e, driver) for e in good if _differs(e, driver)]
    if driver.problem is None and not any(e.needed for e in found[1:]):
        problems += _not_made_yet(driver, folders)
    ready = sum(not _differs(e, driver) for e in good)
    facts = {
        "node": "this one alone; each other node has environments of its own",
        VENVS: ", ".join(map(str, folders)) or "not set",
        "PYTHONPATH": os.environ.get("PYTHONPATH") or "not set",
        "environments": f"{ready} of {sum(e.needed for e in found)} that need fp8rl are ready",
    }
    if os.environ.get(ONE_FOR_ALL) == "1":
        facts[ONE_FOR_ALL] = "1; workers of vLLM and Megatron run in the driver's environment"
    rows = tuple(_row(e, driver) for e in found)
    columns = ("environment", "Python", "fp8rl", "with", "DeepGEMM", "state")
    section = Section("fp8rl in each environment", columns, rows)
    installed = (
        "not found" if package is None else f"{version(package)}, in {package.absolute().parent}"
    )
    return Diagnosis(installed, (KNOWN,), facts, tuple(problems), (section,))


def _folders(package: Path | None) -> list[Path]:
    """Return where NeMo RL has its environments, as ``create_local_venv`` looks for them."""
    given = os.environ.get(VENVS)
    if given:
        return [Path(os.path.normpath(given)).absolute()]
    return [] if package is None else [package.absolute().parent / "venvs"]


def _interpreters(folders: list[Path]) -> list[Environment]:
    """Return the interpreters of the driver, of all environments and of commands on the PATH."""
    found = [Environment(_DRIVER, sys.executable)]
    for folder in folders:
        if folder.is_dir():
            for home in sorted(folder.iterdir()):
                python = home / "bin" / "python"
                if os.path.lexists(python):  # a link that leads nowhere is told, not passed over
                    found.append(Environment(home.name.rpartition(".")[2], str(python)))
    for place in os.environ.get("PATH", "").split(os.pathsep):
        if place and Path(place).is_dir():
            for command in sorted(Path(place).glob("python-*")):
                name = re.fullmatch(r"python-([A-Z]\w+)", command.name)
                if name is not None and os.access(command, os.X_OK):
                    found.append(Environment(name[1], str(command)))
    return found


def _asked(interpreters: list[Environment]) -> list[Environment]:
    """Ask all, and keep one of those that are the same environment."""
    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(_ask, interpreters))
    seen: set[tuple[str, str]] = set()
    kept = []
    for environment in answered:
        place = environment.answer["prefix"] if environment.answer else environment.python
        if (environment.name, place) not in seen:
            seen.add((environment.name, place))
            kept.append(environment)
    return kept


def _ask(environment: Environment) -> Environment:
    """Run :mod:`nemo_rl_ext.doctor.probe` in an interpreter, which need not have fp8rl.

    It starts in the root folder, because Ray's workers do not start in this one.
    """
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [environment.python, "-c", text],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
        )
    except OSError as error:
        return replace(environment, silence=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return replace(environment, silence=f"it took more than {_LIMIT:.0f} s")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return replace(environment, silence=f"exit code {done.returncode}, {last}")
    return replace(environment, answer=json.loads(answers[-1]))


def _differs(environment: Environment, driver: Environment) -> bool:
    """Tell whether both have fp8rl, and not the same code of it."""
    if environment.answer is None or driver.answer is None or driver.problem is not None:
        return False
    return bool(environment.answer["code"] != driver.answer["code"])


def _difference(environment: Environment, driver: Environment) -> str:
    assert environment.answer is not None and driver.answer is not None
    mine, theirs = (
        f"{e.answer['fp8rl']} in '{e.answer['folder']}'"  # type: ignore[index]
        for e in (environment, driver)
    )
    return (
        f"{environment.name} ('{environment.python}') has fp8rl {mine}, whose files are not those "
        f"of the driver's {theirs}; install the same in both, or remove the older one."
    )


def _not_made_yet(driver: Environment, folders: list[Path]) -> list[str]:
    """Return a problem where NeMo RL has yet to make the workers' environments without fp8rl."""
    assert driver.answer is not None
    if os.environ.get(ONE_FOR_ALL) == "1":
        return []
    on_path = [Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if Path(driver.answer["folder"]).resolve().parent in on_path:
        return []
    places = " or ".join(f"'{folder}'" for folder in folders)
    return [
        f"NeMo RL has made no environment of a worker in {places} yet, and those that it makes "
        "will have no fp8rl, because the driver's is not on PYTHONPATH; put fp8rl into a folder on "
        f"PYTHONPATH ({PAGE})."
    ]


def _remedy(python: str) -> str:
    return (
        f"put fp8rl, wrapt and pluggy into a folder on PYTHONPATH ({PAGE}), or run 'uv pip install "
        f"--python {python} --no-deps FP8RL wrapt pluggy', where FP8RL is the path of your clone "
        "or wheel"
    )


def _row(environment: Environment, driver: Environment) -> tuple[str, ...]:
    answer = environment.answer
    if answer is None:
        return (environment.name, "", "", "", "", "no answer")
    versions = answer["versions"]
    if not environment.needed:
        state = "not needed"
    elif environment.problem is not None:
        state = "not ready"
    else:
        state = "other files" if _differs(environment, driver) else "ready"
    return (
        environment.name,
        answer["python"],
        answer["fp8rl"] or "no",
        ", ".join(f"{name} {release or 'missing'}" for name, release in versions.items()),
        answer["DeepGEMM"] or "no",
        state,
    )
