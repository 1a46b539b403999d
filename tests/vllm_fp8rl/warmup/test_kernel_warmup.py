"""Compiling DeepGEMM's kernels ahead, with a package and a compiler that act as the real ones."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.processes import run_forked
from vllm_fp8rl import warmup
from vllm_fp8rl.warmup import KernelWarmup, find_nvcc, find_toolchain
from vllm_fp8rl.warmup.compile_kernels import Shape, Toolchain, rows_to_try

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
LINEAR = [Shape(256, 128, 320), Shape(512, 256, 320)]
"""Three kernels each, by PACKAGE's heuristics."""


@pytest.fixture(params=["2.8", "2.5"])
def toolchain(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Toolchain:
    caplog.set_level(logging.INFO, "vllm.fp8rl")
    logging.getLogger("vllm").propagate = True
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
    return Toolchain(str(tmp_path / "jit"), str(package), str(nvcc), "H100")


def compiled(toolchain: Toolchain) -> list[str]:
    """The command line of each compiler that has run."""
    log = Path(toolchain.nvcc).parent / "log"
    return log.read_text().splitlines() if log.exists() else []


def start(toolchain: Toolchain, *shapes: Shape) -> KernelWarmup:
    started = KernelWarmup(320, lambda: toolchain)
    for n, k, rows, experts in (*shapes, *shapes):  # of two layers
        started.add(n, k, rows, experts)
    started.close()
    return started


def wait(started: KernelWarmup) -> None:
    assert started.watcher is not None
    started.watcher.join(300)
    assert not started.watcher.is_alive()


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


@pytest.mark.parametrize("toolchain", ["2.8"], indirect=True)
def test_kernels_are_compiled_while_a_model_is_built_and_not_again(
    toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    wait(start(toolchain, LINEAR[0]))
    assert "3 DeepGEMM kernels for 1 weight shapes compiled ahead" in caplog.text
    assert start(toolchain, LINEAR[0]).watcher is None


@pytest.mark.slow
def test_an_engine_finds_what_the_processes_of_two_ranks_have_made(
    toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    meet(toolchain, LINEAR[0], 1)  # the engine is first at one of the kernels
    shapes = (*LINEAR, Shape(256, 128, 384, experts=4))
    ranks = start(toolchain, *shapes), start(toolchain, *shapes[::-1])
    for rank in ranks:
        wait(rank)
    assert caplog.text.count("DeepGEMM kernels for 3 weight shapes compiled ahead") == 2
    assert len(compiled(toolchain)) == 8
    assert all(line.endswith(f" -O3 -I{toolchain.package}") for line in compiled(toolchain))
    kernels = list(Path(toolchain.cache).glob("cache/*"))
    files = {file.name for path in kernels for file in path.iterdir()}
    assert files - {".committed"} == {"kernel.cu", "kernel.cubin"}
    meet(toolchain, LINEAR[0], 1, 16, 17, 256, 257, 320)
    assert len(compiled(toolchain)) == 8
    assert start(toolchain, *shapes).watcher is None  # nothing to do
    kernels[0].joinpath("kernel.cubin").unlink()
    assert not all(toolchain.is_compiled(shape) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["compiler", "package"])
def test_a_failure_is_a_warning_and_leaves_no_kernel(
    toolchain: Toolchain, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "compiler":
        (Path(toolchain.nvcc).parent / "broken").touch()
    else:
        (Path(toolchain.package) / "__init__.py").write_text("raise OSError('no such library')")
    wait(start(toolchain, LINEAR[0]))
    assert "first steps will be slow" in caplog.text
    assert {"compiler": "no such header", "package": "no such library"}[broken] in caplog.text
    assert not list(Path(toolchain.cache).glob("cache/*"))
    assert not toolchain.is_compiled(LINEAR[0])


def test_no_job_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "jit:read")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(__file__="deep_gemm/x.py"))
    monkeypatch.setattr(warmup, "find_nvcc", lambda environ: Path(__file__))
    gpu = SimpleNamespace(name="H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = find_toolchain()
    assert found is not None and found.cache == "jit"
    for patch, reason in (
        (
            lambda: monkeypatch.setattr(warmup, "find_nvcc", lambda environ: None),
            "there is no nvcc",
        ),
        (
            lambda: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0)),
            "kernels would run when they are listed",
        ),
        (lambda: monkeypatch.setenv("DG_JIT_USE_NVRTC", "1"), "DG_JIT_USE_NVRTC is set"),
    ):
        patch()
        assert find_toolchain() is None
        assert reason in caplog.text


@given(st.integers(1, 3000))
def test_rows_to_try_meet_every_choice(most: int) -> None:
    def choice(rows: int) -> tuple[object, ...]:
        return rows <= 16, rows <= 32, -(-rows // 64), -(-rows // 128), -(-rows // 256)

    tried = list(rows_to_try(Shape(256, 128, most)))
    assert tried[0] == most
    assert {choice(rows) for rows in tried} == {choice(rows) for rows in range(1, most + 1)}


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
