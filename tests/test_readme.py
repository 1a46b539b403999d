"""The README's claims: its Python is run, its tables and quotations are compared with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import pytest
import torch
import yaml
from pydantic import BaseModel

from fp8rl import Recipe, hookspecs
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape, ReferenceBackend

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "fp8rl_plugin_example"

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def block(name: str) -> str:
    """The fenced Python behind ``<!-- test: name -->``."""
    found = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)^```", README, re.M | re.S)
    assert len(found) == 1, f"README has {len(found)} blocks marked '{name}'"
    return found[0]


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def table(heading: str) -> list[list[str]]:
    """Rows of the first table whose header begins with ``heading``, as cells of plain text."""
    lines = iter(README.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            break
    else:
        raise AssertionError(f"README has no table '{heading}'")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def normal(text: str) -> str:
    return " ".join(text.split())


def run_script(tmp_path: Path, arguments: list[str], *parts: str) -> str:
    """Run code in a fresh process beside the README's recipe.yaml; what it prints."""
    (recipe,) = [text for text in fenced("yaml") if text.startswith("# recipe.yaml")]
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (tmp_path / "script.py").write_text("\n".join(parts), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, **ENGINE_ENV},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# One process for all of it, as the engines take long to import: Megatron's export refits vLLM.
BEFORE = """
import json
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import Qwen3ForCausalLM

from megatron_fp8rl.export import load_hf
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
from megatron_fp8rl.testing.models import build_gpt
from fp8rl_demo.settings import Settings, hf_config, write_model_folder

torch.set_num_threads(1)
torch.manual_seed(0)
shim = CpuShim()
reference = Qwen3ForCausalLM(hf_config(Settings())).to(torch.bfloat16)
reference.save_pretrained("my-model")
write_model_folder(Settings(), Path("my-model"))
sent = {name: tensor.detach() for name, tensor in reference.named_parameters()}
tokens = torch.randint(4, 20, (2, 12))
positions = torch.arange(12).expand(2, -1)
"""

MEGATRON_BEFORE = """
init_gloo()
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
model = build_gpt(hf_config(Settings()))
load_hf(model, sent)
bf16 = model(tokens, positions, None)
"""

# The README's recipe pins the first down_proj and the last layer.
MEGATRON_AFTER = """
assert not torch.equal(logits, bf16), "the linears run in FP8"
assert torch.nn.functional.cosine_similarity(logits.float(), bf16.float(), -1).min() > 0.98
wire = dict(wire)
assert set(wire) == set(sent) | set(scales)
assert all(torch.equal(wire[name], sent[name]) for name in sent)
pinned = {row.name for row in conversion.policy.report() if row.precision == "bf16"}
assert "model.layers.0.mlp.down_proj" in pinned and "model.layers.3.mlp.down_proj" in pinned
half = dict(half)
codes = {name.removesuffix(".weight") for name, t in half.items() if t.dtype == torch.float8_e4m3fn}
assert "model.layers.0.mlp.up_proj" in codes and not codes & pinned
assert all(f"{name}.weight_scale_inv" in half for name in codes)
assert "model.layers.0.self_attn.qkv_proj" in conversion.modules
assert not pinned & set(conversion.modules)
conversion.invalidate()
conversion.drop_codes()
assert torch.equal(model(tokens, positions, None), logits)
conversion.close()
assert torch.equal(model(tokens, positions, None), bf16)
"""

UNCALIBRATED = """
from fp8rl.errors import ScaleError
from vllm_fp8rl.refit import drop_requests

def answer():
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return list(llm.generate("12+30=", params, use_tqdm=False)[0].outputs[0].token_ids)

try:
    answer()
except ScaleError as error:
    print(f"ScaleError: {error}")
    drop_requests(llm)
"""

CALIBRATED = """
assert len(answer()) == 3
tensors = reversed(wire.items())
"""

VLLM_AFTER = """
assert report.kv_scales == 8 and report.tensors == len(sent) + len(scales)
assert outputs[0].outputs[0].token_ids
llm.llm_engine.engine_core.shutdown()
"""

SERVE_FLAGS = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
names = ("quantization", "kv_cache_dtype", "additional_config", "worker_extension_cls")
print(json.dumps({name: getattr(args, name) for name in names}))
"""


@pytest.mark.timeout(240)  # 25 s on an idle core; the machine may be shared
def test_engine_snippets(tmp_path):
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    # An engine that is small and compiles nothing: the README's own arguments, and these.
    start = block("vllm-start").replace(
        "**engine_args(recipe))",
        "max_model_len=32, max_num_seqs=4, enforce_eager=True, **engine_args(recipe))",
    )
    (serve,) = [text for text in fenced("console") if text.startswith("vllm serve")]
    words = shlex.split(serve.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "my-model"]
    inside = indent(MEGATRON_BEFORE + block("megatron") + MEGATRON_AFTER, "    ")
    out = run_script(
        tmp_path,
        words[3:],
        BEFORE,
        f"with shim.active():\n{inside}",
        start,
        UNCALIBRATED,
        block("vllm-calibrate"),
        "assert len(found) == 8 and len(answer()) == 3",
        block("vllm-uncalibrated"),
        CALIBRATED,
        block("vllm-refit"),
        VLLM_AFTER,
        SERVE_FLAGS,
    )
    (told,) = fenced("text")
    assert normal(told) in normal(out)
    assert re.search(r"^\d+ parameters, 8 KV scales in \d+\.\d\d s$", out, re.M)

    from vllm_fp8rl import engine_args
    from vllm_fp8rl.refit.worker import EXTENSION

    flags = json.loads(out.splitlines()[-1])
    recipe = Recipe.from_dict(flags["additional_config"]["fp8rl"])
    expected = engine_args(recipe)
    assert recipe != Recipe()
    assert flags["quantization"] == expected["quantization"]
    assert flags["kv_cache_dtype"] == expected["kv_cache_dtype"]
    assert flags["worker_extension_cls"] == EXTENSION


def test_grpo_snippets(capsys):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 5, generator=generator)
    names: dict[str, Any] = {
        "old": old,
        "rollout": old + 0.05 * torch.randn(8, 5, generator=generator),
        "current": old.clone().requires_grad_(),
        "mask": torch.ones(8, 5),
        "rewards": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]),
        "group_ids": torch.arange(8) // 4,
    }
    exec(block("grpo"), names)
    assert torch.isfinite(names["loss"]) and names["current"].grad.abs().sum() > 0
    kl, ess, clipped = map(float, capsys.readouterr().out.split())
    assert 0 < kl < 0.01 and 0.9 < ess <= 1 and clipped == 0

    names["current"].grad = None
    exec(block("correct"), names)
    found, ratio = names["correction"], (names["old"] - names["rollout"]).double().exp()
    geometric = ratio.log().mean(dim=1, keepdim=True).exp()
    kept = ((geometric >= 0.9) & (geometric <= 1.1)).expand_as(ratio)
    assert torch.equal(found.mask, kept)
    torch.testing.assert_close(found.weights.double(), ratio * kept, rtol=1e-5, atol=0.0)
    names["loss"].backward()
    expected = -ratio * kept * names["advantages"][:, None].double() / kept.sum()
    torch.testing.assert_close(names["current"].grad.double(), expected, rtol=1e-5, atol=1e-9)


def test_nothing_that_the_docs_call_needs_pickle(monkeypatch):
    """An engine core in a process of its own decodes names and numbers, functions only on demand.

    `test_push_to_an_engine_with_processes_of_its_own` refits one.
    """
    from vllm.v1.serial_utils import MsgpackEncoder

    from fp8rl.kv_scales import scale_names
    from vllm_fp8rl.quantization.kv_cache import set_uncalibrated_kv_scales
    from vllm_fp8rl.refit.worker import METHODS

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    scales = dict.fromkeys(scale_names(4, ["k", "v"]), 0.05)
    assert MsgpackEncoder().encode((METHODS["set_kv_scales"], None, (scales,), {}))
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        MsgpackEncoder().encode(("apply_model", None, (set_uncalibrated_kv_scales,), {}))
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert "apply_model(" not in text and "INSECURE_SERIALIZATION" not in text, page.name


def test_every_marked_block_is_run():
    here = Path(__file__).read_text(encoding="utf-8")
    for name in re.findall(r"<!-- test: (\S+) -->", README):
        assert f'block("{name}")' in here
    marked = len(re.findall(r"<!-- test: \S+ -->\n```python", README))
    assert (
        len(fenced("python")) == marked + 1
    )  # and the example plugin, which tests/downstream runs


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, annotation, default as JSON) of a model and its sections."""
    for name, info in model.model_fields.items():
        section = next((t for t in alternatives(info.annotation) if is_section(t)), None)
        optional = type(None) in alternatives(info.annotation)
        if section is None or optional:
            # Through JSON, as a recipe file would give it.
            default = json.loads(json.dumps(info.default))
            yield prefix + name, info.rebuild_annotation(), default
        if section is not None:
            yield from fields(section, f"{prefix}{name}.")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(t for part in typing.get_args(annotation) for t in alternatives(part))
    return (annotation,)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def literals(annotation: Any) -> list[str]:
    """All values of the Literals in a type, as text."""
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [text for part in typing.get_args(annotation) for text in literals(part)]


def test_recipe_table_is_the_model():
    rows = table("key | type")
    described = {quoted(key)[0]: (kind, default) for key, kind, default, _ in rows}
    actual = {key: (annotation, default) for key, annotation, default in fields(Recipe)}
    assert list(described) == list(actual)
    words = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}
    for key, (annotation, default) in actual.items():
        kind, shown = described[key]
        assert yaml.safe_load(quoted(shown)[0]) == default, key
        assert quoted(kind) == literals(annotation), key
        for part in alternatives(annotation):
            if part in words:
                assert words[part] in kind, key
            if typing.get_origin(part) is tuple and part.__args__[-1] is Ellipsis:
                assert kind.startswith("list of"), key
                item = part.__args__[0]
                assert literals(item) or words[item] in kind, key


def test_recipe_example_is_valid_and_not_the_default():
    (text,) = fenced("yaml")
    recipe = Recipe.from_dict(yaml.safe_load(text))
    assert recipe.pins.last == 1
    assert recipe != Recipe()


def test_hook_table_has_every_hook():
    described = [quoted(row[0])[0].partition("(")[0] for row in table("hook |")]
    actual = [n for n, f in vars(hookspecs).items() if hasattr(f, f"{hookspecs.PROJECT}_spec")]
    assert described == actual


def test_example_plugin_is_shown_verbatim():
    for file in ("fp8rl_plugin_example.py", "pyproject.toml"):
        language = "python" if file.endswith(".py") else "toml"
        assert (EXAMPLE / file).read_text(encoding="utf-8") in fenced(language)


def test_demo_options_and_commands():
    from typer.main import get_command

    from fp8rl import PluginManager, cli

    commands = get_command(cli.build_app(PluginManager())).commands
    shown = {quoted(row[0])[0].split()[1] for row in table("command |")}
    assert shown == set(commands)
    options = {o.opts[0]: o.default for o in commands["demo"].params}
    rows = {quoted(row[0])[0].split()[0]: row[1] for row in table("option | default")}
    assert set(rows) == set(options)
    for option in ("--steps", "--compare", "--out", "--seed"):
        assert rows[option].strip("`") == str(options[option])


def test_metrics_table_names_mismatch_and_phases():
    from fp8rl_demo.loop import MISMATCH
    from fp8rl_demo.report.runs import PHASES

    rows = {quoted(cell)[0]: quoted(text) for cell, text in table("field |")}
    assert sorted(rows["mismatch"]) == sorted(MISMATCH)
    assert rows["seconds"] == list(PHASES)


def test_what_is_not_there_is_refused():
    """Row by row of "What is not there yet", as far as it can be seen without a GPU."""
    from fp8rl.gemm import BackendChoice
    from vllm_fp8rl import compat
    from vllm_fp8rl.kernels.choice import select_kernel

    gpu, shape = torch.device("cuda:0"), GemmShape(128, 256, 256)
    if compat.installed_version() not in compat.GPU_TESTED:
        with pytest.raises(UnsupportedError, match=r"On a GPU vllm_fp8rl serves vLLM 0\.25\.1"):
            select_kernel(gpu, shape, Recipe(), torch.bfloat16)
    backends = BackendChoice({ReferenceBackend.name: ReferenceBackend()}, ("fp32",))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UnsupportedError, match="No FP8 GEMM backend serves 'x'"),
    ):
        patch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
        backends.pick(gpu, shape, "x")


def test_performance_tables_are_the_measurements():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    for row in json.loads((results / "quantize_h100.json").read_text())["rows"]:
        time, share = row["milliseconds"] * 1000, row["share_of_copy"]
        assert f"{time:.0f} µs, {row['gigabytes_per_second']:.0f} ({share:.0%})" in text
    refits = json.loads((results / "refit_cost_cpu.json").read_text())
    assert refits["command"] in text
    for row in refits["rows"]:
        extra = f"{row['extra_bytes_peak'] / 2**20:.1f} MiB | {row['extra_in_layers']:.2f}"
        assert f"| {row['seconds_median']:.2f} (" in text and extra in text


def test_names_of_ours_in_the_documents_are_in_the_code():
    """Such as the workers' methods, which are called by name from another process."""
    folders = ("plugins", "vllm_fp8rl", "megatron_fp8rl", "nemo_rl_ext", "fp8rl_demo", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    code = " ".join(f"{file.stem} {file.read_text(encoding='utf-8')}" for file in files)
    known = set(re.findall(r"fp8rl_\w+", code))
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"\bfp8rl_\w+", document.read_text(encoding="utf-8")))
        assert named <= known, f"{document.name} names {sorted(named - known)}"


def test_links_lead_to_files():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
