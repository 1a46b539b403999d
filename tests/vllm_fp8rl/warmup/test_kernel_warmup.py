"""Compiling DeepGEMM's kernels ahead, with a package and a compiler that act as the real ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import envs

from support.processes import run_forked
from vllm_fp8rl.warmup import KernelWarmup
from vllm_fp8rl.warmup import compile_kernels as program
from vllm_fp8rl.warmup import kernel_warmup as warmup
from vllm_fp8rl.warmup.kernel_lists import rows_to_try
from vllm_fp8rl.warmup.kernel_warmup import find_nvcc, find_toolchain
from vllm_fp8rl.warmup.shapes import Shape, Toolchain

# As csrc/jit/compiler.hpp and kernel_runtime.hpp of DeepGEMM 2.5 do: the name hashes the source,
# the compiler's version and the flags; a kernel is loaded as soon as it has been made. DEEP_JIT
# tells what is different in 2.8.
PACKAGE = """
import hashlib, os, pathlib, subprocess, uuid

def fp8_gemm_nt(x, weight, out, disable_ue8m0_cast):
    (rows, k), n = x[0].shape, weight[0].shape[0]
    assert disable_ue8m0_cast and x[1].shape == (rows, k // 128) and x[1].stride(0) == 1
    build("gemm", f"// {n} {k} {16 if rows <= 16 else 64 if rows <= 256 else 128}\\n")

def m_grouped_fp8_gemm_nt_contiguous(x, weight, out, experts, disable_ue8m0_cast):
    groups, n, k = weight[0].shape
    assert len(experts) == len(x[0]) and len(x[0]) % 128 == 0
    build("grouped", f"// {groups} {n} {k} {len(x[0]) <= 256}\\n")

def build(name, code):
    nvcc = os.environ["DG_JIT_NVCC_COMPILER"]
    version = subprocess.check_output([nvcc, "--version"], text=True)
    digest = hashlib.md5((code + version).encode()).hexdigest()
    root = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"])
    made = root / "cache" / f"kernel.{name}.{digest}"
    if not made.exists():
        folder = root / "tmp" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text(code)
        output = f"{folder}/kernel.cubin -O3 -I{os.path.dirname(__file__)}"
        command = f"cd {root} && {nvcc} {folder}/kernel.cu -cubin -o {output}"
        subprocess.run(command, shell=True, check=True)
        made.parent.mkdir(exist_ok=True)
        folder.rename(made)
    if (made / "kernel.cubin").read_text() != "cubin\\n":
        raise RuntimeError("CUDA driver error: invalid image")
"""
DEEP_JIT = {
    'f"kernel.{name}.{digest}"': 'f"{name}.{digest}"',
    "made.exists()": '(made / ".committed").exists()',
    "kernel.cu -cubin -o": "kernel.cu --cubin --output-file",
    "        made.parent": (
        '        assert (folder / "kernel.cubin").stat().st_size\n'
        '        (folder / ".committed").touch()\n'
        "        made.parent"
    ),
}
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.0"; exit; fi
echo "$@" >> "$(dirname "$0")/log"
if [ -e "$(dirname "$0")/broken" ]; then echo "no such header" >&2; exit 1; fi
sleep 0.05
while [ "$1" != -o ] && [ "$1" != --output-file ]; do shift; done
echo cubin > "$2"
"""
LINEAR = [Shape(256, 128, 1024), Shape(512, 256, 1024)]
"""Three kernels each, by PACKAGE's heuristics."""


@pytest.fixture(params=["2.8", pytest.param("2.5", marks=pytest.mark.slow)])
def toolchain(tmp_path: Path, request: pytest.FixtureRequest) -> Toolchain:
    package = tmp_path / "deep_gemm"
    package.mkdir()
    code = PACKAGE
    for old, new in DEEP_JIT.items() if request.param == "2.8" else ():
        assert old in code
        code = code.replace(old, new)
    (package / "__init__.py").write_text(code)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    return Toolchain(str(tmp_path / "jit"), str(package), str(nvcc), "H100", 0, full=False)


one_layout = pytest.mark.parametrize("toolchain", ["2.8"], indirect=True)
"""For tests of our processes, to which the layout of a cache makes no difference."""


def compiled(toolchain: Toolchain) -> list[str]:
    """The command line of each compiler that has run."""
    log = Path(toolchain.nvcc).parent / "log"
    return log.read_text().splitlines() if log.exists() else []


def kernels(toolchain: Toolchain) -> list[Path]:
    return list(Path(toolchain.cache).glob("cache/*"))


def run_program(toolchain: Toolchain, shapes: list[Shape]) -> dict[str, Any]:
    lines = [json.dumps(asdict(toolchain)), *(json.dumps(shape) for shape in shapes)]
    command = [sys.executable, "-m", "vllm_fp8rl.warmup.compile_kernels"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=True, timeout=100
    )
    return json.loads(done.stdout)


PRODUCTS = """
import json, sys
import torch, deep_gemm
f8 = torch.float8_e4m3fn
n, k, numbers = map(json.loads, sys.argv[1:])
for rows in numbers:
    x = torch.empty(rows, k, dtype=f8), torch.empty(k // 128, rows).t()
    deep_gemm.fp8_gemm_nt(x, (torch.empty(n, k, dtype=f8), None), None, True)
"""


def meet(toolchain: Toolchain, shape: Shape, *numbers: int) -> None:
    """What an engine does at products of so many rows, in a process of its own."""
    folder = Path(toolchain.package).parent
    script = folder / "products.py"
    script.write_text(PRODUCTS)
    names = {"DG_JIT_CACHE_DIR": toolchain.cache, "DG_JIT_NVCC_COMPILER": toolchain.nvcc}
    arguments = shape.n, shape.k, list(numbers)
    done = run_forked(script, *arguments, timeout=60, folders=(folder,), **names)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_engine_finds_what_two_processes_have_made_together(toolchain: Toolchain) -> None:
    with ThreadPoolExecutor(2) as pool:  # one has the shapes in the other order
        orders = (LINEAR, LINEAR[::-1])
        answers = list(pool.map(lambda shapes: run_program(toolchain, shapes), orders))
    assert [answer["error"] for answer in answers] == [None, None]
    assert sum(answer["compiled"] for answer in answers) == len(compiled(toolchain)) == 6
    assert all(
        line.endswith(f"/kernel.cubin -O3 -I{toolchain.package}") for line in compiled(toolchain)
    )
    assert all(toolchain.is_compiled(shape) for shape in LINEAR)
    files = {file.name for path in kernels(toolchain) for file in path.iterdir()}
    assert files - {".committed"} == {"kernel.cu", "kernel.cubin"}
    meet(toolchain, LINEAR[0], 1, 16, 17, 256, 257, 1024)
    assert len(compiled(toolchain)) == 6


def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "NVCC_SECONDS", 1)
    command = ["sh", "-c", "sleep 50 & echo $! > child; wait"]
    with pytest.raises(RuntimeError, match=r"^sh did not finish kernel\.gemm within 1 s$"):
        program._run_compiler(command, tmp_path, "kernel.gemm")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_experts_and_what_the_cache_has(toolchain: Toolchain) -> None:
    experts = Shape(256, 128, 512, groups=4)
    meet(toolchain, LINEAR[0], 1)
    assert run_program(toolchain, [LINEAR[0], experts]) == {"compiled": 4, "error": None}
    kernels(toolchain)[0].joinpath("kernel.cubin").unlink()
    assert not all(toolchain.is_compiled(shape) for shape in (LINEAR[0], experts))


@one_layout
def test_shapes_are_compiled_while_a_model_is_built_and_not_again(
    toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.fp8rl")
    logging.getLogger("vllm").propagate = True
    cold = KernelWarmup(1024, lambda: toolchain)
    for _ in range(2):  # layers
        cold.add(256, 128)
        cold.add(512, 256)
    cold.close()
    assert cold.join(timeout=60)
    assert "6 DeepGEMM kernels for 2 weight shapes compiled ahead" in caplog.text
    warm = KernelWarmup(1024, lambda: toolchain)
    warm.add(256, 128)
    assert warm._process is None
    assert warm.join()


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["compiler", "package"])
def test_a_failure_is_a_warning_and_leaves_no_kernel(
    toolchain: Toolchain, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    if broken == "compiler":
        (Path(toolchain.nvcc).parent / "broken").touch()
    else:
        (Path(toolchain.package) / "__init__.py").write_text("raise OSError('no such library')")
    warmup = KernelWarmup(1024, lambda: toolchain)
    warmup.add(256, 128)
    assert warmup.join(timeout=60)
    assert "first steps will be slow" in caplog.text
    assert {"compiler": "no such header", "package": "no such library"}[broken] in caplog.text
    assert kernels(toolchain) == []
    assert not toolchain.is_compiled(Shape(256, 128, 1024))
    assert not list(Path(toolchain.cache).glob("tmp/*"))


def test_no_job_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    monkeypatch.setattr(envs, "VLLM_DEEP_GEMM_WARMUP", "relax", raising=False)
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert find_toolchain() is None
    assert "DG_JIT_USE_NVRTC is set" in caplog.text
    monkeypatch.delenv("DG_JIT_USE_NVRTC")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "jit")
    monkeypatch.setenv("CUDA_HOME", "nowhere")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(__file__="deep_gemm/x.py"))
    assert find_toolchain() is None
    assert "there is no nvcc; install" in caplog.text
    monkeypatch.setattr(warmup, "find_nvcc", lambda environ: Path("nvcc"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert find_toolchain() is None
    assert "kernels would run when they are listed" in caplog.text


@pytest.mark.parametrize("setting", ["skip", "relax", "full"])
def test_kernels_are_compiled_ahead_whatever_warm_up_vllm_has(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``skip`` is about the warm-up for which an engine waits."""
    monkeypatch.setattr(envs, "VLLM_DEEP_GEMM_WARMUP", setting, raising=False)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "jit")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(__file__="deep_gemm/x.py"))
    monkeypatch.setattr(warmup, "find_nvcc", lambda environ: Path("nvcc"))
    gpu = SimpleNamespace(name="H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    toolchain = find_toolchain()
    assert toolchain is not None and toolchain.cache == "jit"
    assert toolchain.full == (setting == "full")


@given(st.integers(1, 3000))
def test_rows_to_try_meet_every_choice(most: int) -> None:
    def choice(rows: int) -> tuple[object, ...]:
        return rows <= 16, rows <= 32, -(-rows // 64), -(-rows // 128), -(-rows // 256)

    tried = list(rows_to_try(Shape(256, 128, most), full=False))
    assert tried[0] == most
    assert {choice(rows) for rows in tried} == {choice(rows) for rows in range(1, most + 1)}
    assert set(rows_to_try(Shape(256, 128, most), full=True)) == set(range(1, most + 1))


def test_the_compiler_is_found_as_deep_gemm_finds_it(tmp_path: Path) -> None:
    for name in ("named", "cuda/bin/nvcc", "path/bin/nvcc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path / "path/bin")}
    home = path | {"CUDA_HOME": str(tmp_path / "cuda")}
    named = home | {"DG_JIT_NVCC_COMPILER": str(tmp_path / "named")}
    assert find_nvcc(path) == tmp_path / "path/bin/nvcc"
    assert find_nvcc(home) == tmp_path / "cuda/bin/nvcc"
    assert find_nvcc(named) == tmp_path / "named"
    assert find_nvcc(home | {"CUDA_HOME": str(tmp_path)}) is None
