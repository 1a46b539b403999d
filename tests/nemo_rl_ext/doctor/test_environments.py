"""``fp8rl doctor nemo-rl-environments``, with virtual environments laid out as NeMo RL does."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8rl.errors import UnsupportedError
from fp8rl.plugins.adapters import Diagnosis
from nemo_rl_ext.doctor import environments
from nemo_rl_ext.doctor.environments import examine_environments
from support.nemo_rl import write_checkout
from support.sources import ROOT

SITE = Path(sysconfig.get_path("purelib"))
AS_THE_DRIVER = f"import site; site.addsitedir({str(SITE)!r})"
VLLM = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
SGLANG = "nemo_rl.models.generation.sglang.sglang_worker.SGLangGenerationWorker"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's environments nor what the caller's PYTHONPATH has."""
    for name in ("PYTHONPATH", environments.VENVS, environments.ONE_FOR_ALL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run's environments, still empty."""
    folder = tmp_path / "venvs"
    folder.mkdir()
    monkeypatch.setenv(environments.VENVS, str(folder))
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkout(tmp_path_factory.mktemp("checkout"))


def without(folder: Path, *parts: str, of: Path) -> Path:
    """Make a folder with links to all that another has, but for names with these parts."""
    folder.mkdir()
    for file in of.iterdir():
        if not any(part in file.name for part in parts):
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of this environment but fp8rl."""
    folder = tmp_path_factory.mktemp("dependencies") / "site"
    return without(folder, "fp8rl", ".pth", of=SITE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pip install --target --no-deps`` makes of fp8rl."""
    folder = tmp_path_factory.mktemp("target")
    for package in ("plugins/fp8rl", "vllm_fp8rl", "megatron_fp8rl", "torch_fp8rl", "nemo_rl_ext"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=ignore)
    info = folder / "fp8rl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8rl\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nfp8rl = nemo_rl_ext.autoload:start\n"
        "[vllm.general_plugins]\nfp8rl = vllm_fp8rl:register\n"
    )
    return folder


def make(folder: Path, *lines: object) -> Path:
    """Make a virtual environment whose path has these lines of a ``.pth``; returns its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "test.pth").write_text("".join(f"{line}\n" for line in lines))
    return folder / "bin" / "python"


def rows(found: Diagnosis) -> dict[str, Mapping[str, str]]:
    table = found.sections[0]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_each_environment_says_what_it_has(
    venvs: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(venvs.parent)
    monkeypatch.setenv(environments.VENVS, "./venvs")
    make(venvs / VLLM, AS_THE_DRIVER)
    megatron = make(venvs / MEGATRON)
    make(venvs / SGLANG)
    found = examine_environments(checkout)
    told = rows(found)
    assert {name: row["state"] for name, row in told.items()} == {
        "driver": "ready",
        "VllmGenerationWorker": "ready",
        "MegatronPolicyWorker": "not ready",
        "SGLangGenerationWorker": "not needed",
    }
    assert told["driver"] == {**told["VllmGenerationWorker"], "environment": "driver"}
    assert told["driver"]["Python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert told["driver"]["with"].count("missing") == 0
    assert told["MegatronPolicyWorker"]["fp8rl"] == "no"
    assert found.facts["environments"] == "2 of 3 that need fp8rl are ready"
    (problem,) = found.problems
    assert problem.startswith(
        f"MegatronPolicyWorker ('{megatron}') cannot import fp8rl (ModuleNotFoundError: No module "
        "named 'fp8rl'); put fp8rl, wrapt and pluggy into a folder on PYTHONPATH "
        f"(docs/nemo_rl_install.md), or run 'uv pip install --python {megatron} --no-deps FP8RL "
    )


def test_a_folder_on_the_path_serves_all(
    tmp_path: Path,
    checkout: Path,
    target: Path,
    dependencies: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With NeMo RL's default folder, and a command on the PATH as in NVIDIA's images."""
    python = make(tmp_path / "container" / MEGATRON, dependencies)
    command = tmp_path / "bin" / "python-MegatronPolicyWorker"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    command.chmod(0o755)
    (tmp_path / "bin" / "python-argcomplete-check").write_text("")
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.defpath}")
    monkeypatch.setenv("PYTHONPATH", str(target))
    made = checkout / "venvs"
    monkeypatch.chdir(checkout)
    try:
        make(made / VLLM, dependencies)
        found = examine_environments(Path())
    finally:
        shutil.rmtree(made)
    assert found.problems == ()
    assert found.facts[environments.VENVS] == str(made)
    assert [row[0] for row in found.sections[0].rows] == [
        "driver",
        "VllmGenerationWorker",
        "MegatronPolicyWorker",
    ]


def test_other_files_a_missing_part_and_no_entry_points_are_told(
    tmp_path: Path, venvs: Path, checkout: Path, target: Path, dependencies: Path
) -> None:
    older = tmp_path / "older"
    shutil.copytree(target, older)
    (older / "fp8rl" / "numerics" / "formats.py").write_text("")
    make(venvs / MEGATRON, older, dependencies)
    nameless = without(tmp_path / "nameless", "dist-info", of=target)
    make(venvs / VLLM, nameless, dependencies)
    bare = without(tmp_path / "bare", "wrapt", of=dependencies)
    make(venvs / "a.DTensorPolicyWorkerV2", target, bare)
    dtensor, vllm, megatron = examine_environments(checkout).problems
    assert "cannot import wrapt (ModuleNotFoundError: No module named 'wrapt'); put" in dtensor
    assert f"has fp8rl in '{nameless / 'fp8rl'}', but not its entry point in 'vllm.general" in vllm
    assert f"has fp8rl 0.1.0 in '{older / 'fp8rl'}', whose files are not those of" in megatron


def test_an_interpreter_that_does_not_start(venvs: Path, checkout: Path) -> None:
    for name, text in ((VLLM, ""), (MEGATRON, "#!/bin/sh\necho odd >&2\nexit 3\n")):
        python = venvs / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(text)
        python.chmod(0o755)
    gone = venvs / "a.DTensorPolicyWorker" / "bin" / "python"  # as uv leaves a removed Python
    gone.parent.mkdir(parents=True)
    gone.symlink_to("nowhere")
    found = examine_environments(checkout)
    dtensor, vllm, megatron = found.problems
    assert f"DTensorPolicyWorker ('{gone}') does not answer: No such file" in dtensor
    assert "does not answer: Exec format error; have NeMo RL make it anew with" in vllm
    assert "does not answer: exit code 3, odd; have NeMo RL make it anew" in megatron


def test_environments_that_are_not_made_yet(
    checkout: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = examine_environments(checkout).problems
    assert problem.startswith(
        f"NeMo RL has made no environment of a worker in '{checkout / 'venvs'}' yet, and those that"
    )
    monkeypatch.setenv(environments.ONE_FOR_ALL, "1")
    assert examine_environments(checkout).problems == ()
    monkeypatch.delenv(environments.ONE_FOR_ALL)
    monkeypatch.setenv("PYTHONPATH", str(target))
    assert examine_environments(checkout).problems == ()


def test_without_nemo_rl_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "installed_package", lambda: None)
    with pytest.raises(UnsupportedError, match="run this in its driver's environment, give --so"):
        examine_environments(None)
