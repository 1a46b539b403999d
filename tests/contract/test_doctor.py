"""``fp8rl doctor nemo-rl`` on every config of a checkout that asks for FP8; nothing is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nemo_rl_yamls
import pytest

from fp8rl.plugins.adapters import ConfigRequest
from nemo_rl_ext.config.drivers import driver_of
from nemo_rl_ext.doctor.config_file import load_config
from nemo_rl_ext.doctor.examination import examine
from nemo_rl_ext.doctor.wake_up import CACHE_KEY
from support.sources import source


def test_the_page_has_what_the_doctor_says_of_upstreams_fp8_configs() -> None:
    text = nemo_rl_yamls.PAGE.read_text(encoding="utf-8")
    found = nemo_rl_yamls.page(text, source("NEMO_RL_SRC"))
    assert found == text, "run tools/nemo_rl_yamls.py"
    assert found.count("| resolves |") + found.count("| refused (") == 19


def test_every_config_that_resolves_has_a_recipe_of_ours_in_which_the_doctor_finds_no_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And whose KV cache is what the doctor says: its own, or upstream's where that is not more."""
    root = source("NEMO_RL_SRC")
    monkeypatch.setenv("NEMO_RL_CONFIGS", str(root / "examples" / "configs"))
    text = nemo_rl_yamls.PAGE.read_text(encoding="utf-8")
    wanted = set(re.findall(r"^\| `(?:\w+/)*([^`/]+)` .* resolves \|$", text, re.MULTILINE))
    assert len(wanted) == 13
    own = 0
    for file in (nemo_rl_yamls.PAGE.parents[1] / "recipes").glob("*.yaml"):
        if file.stem == "keys":
            continue
        written, policy = file.read_text(), load_config(file)["policy"]
        wanted -= set(re.findall(r"NEMO_RL_CONFIGS\}/(?:\w+/)*(.+)$", written, re.MULTILINE))
        model = next(m for m in nemo_rl_yamls.MODELS if m in policy["model_name"])
        (tmp_path / "config.json").write_text(json.dumps(nemo_rl_yamls.MODELS[model]))
        memory = 180 if "blackwell" in file.stem else 80
        found = examine(ConfigRequest(file, root, tmp_path, gpu_memory=memory))
        assert found.problems == (), file.stem
        if found.facts["training"].startswith("FP8"):  # the logits in one pass
            assert policy["logprob_chunk_size"] and policy["megatron_cfg"]["defer_fp32_logits"]
        (section,) = (s for s in found.sections if s.title.startswith("KV cache when"))
        given = (policy["generation"].get("vllm_kwargs") or {}).get("kv_cache_memory_bytes")
        told = {row[0]: row[1] for row in section.rows}
        if "kv_cache_memory_bytes" in written.partition("\nfp8rl:")[2]:
            assert told["write"].startswith(f"{CACHE_KEY}: {given} "), file.stem
            own += 1
        elif given is None:
            assert "not needed" in told[CACHE_KEY], file.stem
        else:
            assert "more" not in told["the config has"], file.stem
    assert own == 10
    assert not wanted


def test_the_driver_of_a_config_is_the_one_that_upstream_runs_it_with() -> None:
    root = source("NEMO_RL_SRC")
    configs = {file.stem: file for file in (root / "examples" / "configs").rglob("*.yaml")}
    known: dict[str, str] = {}
    for script in sorted((root / "tests" / "test_suites").rglob("*.sh")):
        run = re.search(r"examples/((?:nemo_gym/)?run_\w+\.py)", script.read_text("utf-8"))
        if run is not None and script.stem in configs:
            known.setdefault(run[1], script.stem)  # one of each: a config takes a second to read
    assert len(known) > 6
    for script_name, config in known.items():
        driver = driver_of(load_config(configs[config]))
        assert driver is not None
        assert script_name in driver.scripts, config
