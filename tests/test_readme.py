"""Claims of the README and the guides: their Python is run, tables and quotations are compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from fp8rl import Recipe
from fp8rl.gemm import GemmShape
from fp8rl.plugins import hookspecs
from support.processes import environment, run_forked

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
README, VLLM, RECIPE, EXTENDING = (
    PAGES[name] for name in ("README.md", "docs/vllm.md", "docs/recipe.md", "docs/extending.md")
)
CODE = ("plugins", "vllm_fp8rl", "megatron_fp8rl", "torch_fp8rl", "nemo_rl_ext")
CODE += ("fp8rl_bench", "fp8rl_demo", "examples")
RUN_ELSEWHERE = {"offline", "async", "weight-transfer"}
"""Blocks of the guides that tests/vllm_fp8rl/refit runs on its engines."""

MEGATRON_ENV = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def block(name: str) -> str:
    """The fenced Python behind ``<!-- test: name -->``, wherever it is."""
    marked = re.compile(rf"<!-- test: {name} -->\n```python\n(.*?)^```", re.M | re.S)
    found = [code for page in PAGES.values() for code in marked.findall(page)]
    assert len(found) == 1, f"README and docs have {len(found)} blocks marked '{name}'"
    return found[0]


def fenced(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def table(heading: str, page: str) -> list[list[str]]:
    """Rows of the first table whose header begins with ``heading``, as cells of plain text."""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            break
    else:
        raise AssertionError(f"The page has no table '{heading}'")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def write_recipe(folder: Path) -> None:
    """Write the recipe.yaml of docs/recipe.md."""
    (recipe,) = [text for text in fenced("yaml", RECIPE) if text.startswith("# recipe.yaml")]
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")


def plain_environment(**more: str) -> dict[str, str]:
    """Variables of a user's new process: none of vLLM's and torch's that these tests set."""
    kept = {
        name: value
        for name, value in environment(**more).items()
        if not name.startswith(("VLLM_", "TORCH", "OMP_", "HF_", "FP8RL_")) or name in more
    }
    startup = str(ROOT / "tests" / "support" / "startup")
    path = [part for part in kept["PYTHONPATH"].split(os.pathsep) if part != startup]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


BEFORE = """
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from megatron_fp8rl.export import load_hf
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo
from megatron_fp8rl.testing.models import build_gpt
from fp8rl_demo.settings import ModelSize, Settings, hf_config, write_model_folder

torch.set_num_threads(1)
torch.manual_seed(0)
shim = CpuShim()
settings = Settings(model=ModelSize(num_layers=2))
reference = Qwen3ForCausalLM(hf_config(settings)).to(torch.bfloat16)
write_model_folder(settings, Path("my-model"))
sent = {name: tensor.detach() for name, tensor in reference.named_parameters()}
tokens = torch.randint(4, 20, (2, 12))
positions = torch.arange(12).expand(2, -1)
"""

MEGATRON_BEFORE = """
init_gloo()
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
model = build_gpt(hf_config(settings))
load_hf(model, sent)
bf16 = model(tokens, positions, None)
"""

# Between the README's block and the guide's: the model is what it was.
MEGATRON_BETWEEN = """
assert not torch.equal(logits, bf16), "the linears run in FP8"
assert {name for name, tensor in wire} == {*sent, *observer.scales(1.0)}
observer.close()
conversion.close()
assert torch.equal(model(tokens, positions, None), bf16)
"""

# The recipe of docs/recipe.md pins the first down_proj and the last layer.
MEGATRON_AFTER = """
assert not torch.equal(logits, bf16), "the linears run in FP8"
assert torch.nn.functional.cosine_similarity(logits.float(), bf16.float(), -1).min() > 0.98
wire = dict(wire)
assert set(wire) == set(sent) | set(scales)
assert all(torch.equal(wire[name], sent[name]) for name in sent)
pinned = {row.name for row in conversion.policy.report() if row.precision == "bf16"}
assert "model.layers.0.mlp.down_proj" in pinned and "model.layers.1.mlp.down_proj" in pinned
half = dict(half)
codes = {name.removesuffix(".weight") for name, t in half.items() if t.dtype == torch.float8_e4m3fn}
assert "model.layers.0.mlp.up_proj" in codes and not codes & pinned
assert all(f"{name}.weight_scale_inv" in half for name in codes)
assert "model.layers.0.self_attn.qkv_proj" in conversion.modules
assert not pinned & set(conversion.modules)
assert not torch.equal(model(tokens, positions, None), logits), "K and V are in FP8"
cache.clear()
conversion.invalidate()
conversion.drop_codes()
assert torch.equal(model(tokens, positions, None), logits)
conversion.close()
assert torch.equal(model(tokens, positions, None), bf16)
held = {name: tensor.contiguous() for name, tensor in wire.items()}
save_file(held, "my-model/model.safetensors", metadata={"format": "pt"})
"""

# The README's lines as a script, and after them the blocks of the guide on its engine.
SCRIPT = f"""
from safetensors.torch import load_file
from vllm import SamplingParams


def main() -> None:
    tensors = load_file("my-model/model.safetensors").items()
{indent(block("vllm"), "    ")}
    assert next(iter(outputs[0].outputs[0].logprobs[0].values())).logprob <= 0
    guide(llm, tensors, report)


def guide(llm, tensors, report):
    assert report.kv_scales == 4 and report.tensors == len(tensors)
    tensors = reversed(tensors)
{indent(block("vllm-calibrate"), "    ")}
    assert len(found) == 4
{indent(block("vllm-uncalibrated").replace("names(4,", "names(2,"), "    ")}
{indent(block("vllm-refit"), "    ")}
    assert report.kv_scales == 4 and outputs[0].outputs[0].token_ids
"""


def run_megatron_snippets(folder: Path) -> None:
    """Run the trainer's blocks, which leave a model and the guide's recipe in the folder."""
    write_recipe(folder)
    blocks = (block("megatron"), MEGATRON_BETWEEN, block("megatron-guide"), MEGATRON_AFTER)
    inside = indent(MEGATRON_BEFORE + "".join(blocks), "    ")
    parts = (f"import os\nos.chdir({str(folder)!r})", BEFORE, f"with shim.active():\n{inside}")
    (folder / "megatron.py").write_text("\n".join(parts), encoding="utf-8")
    done = run_forked(folder / "megatron.py", timeout=200, **MEGATRON_ENV)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_megatron_snippets(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    run_megatron_snippets(tmp_path)
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


# One process is a world of its own.
TORCH = f"""
from torch.distributed import FileStore, destroy_process_group, init_process_group

from support.hf import hf_model, ids
from torch_fp8rl.layers import Fp8Torch

model, tokens = hf_model(num_hidden_layers=4), ids()
names = [name for name, _ in model.named_parameters()]
{block("torch")}
init_process_group("gloo", store=FileStore("store", 1), rank=0, world_size=1)
before = {{name: tensor for name, tensor in wire if name not in scales}}
assert len(scales) == 12
loss = model(tokens, labels=tokens).loss
model.zero_grad()
{block("torch-fsdp")}
assert model(tokens, labels=tokens).loss == loss
assert sum(isinstance(module, Fp8Torch) for module in model.modules()) > 10
after = dict(export_hf(model))
assert list(before) == list(after) == names
assert all(torch.equal(before[name], after[name]) for name in names)
destroy_process_group()
"""


def test_torch_snippets(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    script = tmp_path / "trainer.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{TORCH}", encoding="utf-8")
    done = run_forked(script, timeout=120, **MEGATRON_ENV, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(400)  # a minute of a core, much of it vLLM's compiler
def test_engine_snippets(tmp_path: Path) -> None:
    """Megatron's tensors, then the README's lines on vLLM, started by the guide's command in bash.

    They run with vLLM's defaults: an engine in processes of its own that are spawned, and
    compiled. Only the variable that the guide names is set.
    """
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    run_megatron_snippets(tmp_path)
    guard = block("vllm-start").split("\n\n\nif __name__")[1]
    script = f"{SCRIPT}\n\nif __name__{guard}"
    (tmp_path / "my_rollout.py").write_text(script, encoding="utf-8")
    (command,) = [text for text in fenced("console", VLLM) if "my_rollout.py" in text]
    assert re.match(r"VLLM_CPU_KVCACHE_SPACE=\d+ python my_rollout\.py$", command)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=350,
        env=plain_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert len(re.findall(r"^\d+ parameters, 4 KV scales in \d+\.\d\d s$", done.stdout, re.M)) == 1


def test_servers_of_the_pages_listen_on_this_machine_alone() -> None:
    """Refits and any method of a worker need no key (docs/vllm.md, "Who may reach the port")."""
    files = [file for folder in (*CODE, "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    texts = [*PAGES.values(), *(file.read_text(encoding="utf-8") for file in files)]
    joined = re.sub(r"\\{1,2}\n\s*", "", "\n".join(texts))
    commands = re.findall(r"\b(?:trl vllm-serve|vllm serve) +[-\w][^\n`]*", joined)
    assert len(commands) >= 4
    assert not [command for command in commands if "127.0.0.1" not in command.split()]


def test_a_key_does_not_guard_what_the_guide_says() -> None:
    """docs/vllm.md, "Who may reach the port": vLLM's own middleware before an empty server."""
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    section = VLLM.split("\n### Who may reach the port\n")[1].split("\n#")[0]
    unguarded = re.findall(r"`(/\w+)`", section.split("without the key")[1])
    assert len(unguarded) > 5
    server = Starlette()
    server.add_middleware(authenticate.AuthenticationMiddleware, tokens=["secret"])
    client = TestClient(server)
    assert client.get("/v1/models").status_code == 401
    assert {path: client.post(path).status_code for path in unguarded} == dict.fromkeys(
        unguarded, 404
    )


def test_grpo_snippets(capsys):
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block("grpo"), names)
    assert torch.isfinite(names["loss"]) and names["current"].grad.abs().sum() > 0
    kl, ess, clipped = map(float, capsys.readouterr().out.split())
    assert 0 < kl < 0.01 and 0.9 < ess <= 1 and clipped == 0

    before = names["loss"].item()
    exec(block("loss"), names)  # the README's, over the guide's tensors
    assert names["loss"].item() == before and names["current"].grad.abs().sum() > 0

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

    optimizer = torch.optim.SGD([names["current"]], lr=1.0)
    for rejected, weight in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0)):
        names["current"].grad = torch.ones(8, 5)
        before = names["current"].detach().clone()
        metrics = {"all_rejected": rejected, "is_weight_max": weight}
        exec(block("rejected"), {**names, "metrics": metrics, "optimizer": optimizer})
        assert torch.equal(names["current"], before) != bool(weight)

    exec(block("modes"), names)
    assert (names["gspo"].loss_mode, names["cispo"].loss_mode) == ("gspo", "cispo")


def test_nothing_that_the_docs_call_needs_pickle():
    """An engine core in another process decodes names and numbers, functions on demand only."""
    for page, text in PAGES.items():
        code = "".join(text.split("```")[1::2])
        assert "apply_model(" not in text and "INSECURE_SERIALIZATION" not in code, page


def test_entry_of_a_family() -> None:
    exec(block("family"), {})


def test_gemm_snippet():
    from fp8rl import PluginManager
    from fp8rl.gemm import GemmBackend
    from fp8rl.numerics import quantize_block, quantize_group

    names: dict[str, Any] = {}
    exec(block("gemm"), names)
    plugins = PluginManager(discover=False)
    plugins.register(SimpleNamespace(register_gemm_backends=names["register_gemm_backends"]))
    mine = plugins.gemm_backends()["mine"]
    assert isinstance(mine, GemmBackend)
    assert mine.supports(torch.device("cpu"), GemmShape(1, 128, 128), "fp32") is None
    x, w = torch.randn(3, 128), torch.randn(128, 128)
    product = mine.fprop(quantize_group(x), quantize_block(w), torch.float32)
    assert torch.nn.functional.cosine_similarity(product, x @ w.t(), -1).min() > 0.98


def test_corrector_snippet():
    from fp8rl import PluginManager
    from fp8rl.recipe import ImportanceSampling
    from nemo_rl_ext import correct, resolve_corrector

    names: dict[str, Any] = {}
    exec(block("corrector"), names)
    plugins = PluginManager(discover=False)
    plugins.register(SimpleNamespace(register_is_correctors=names["register_is_correctors"]))
    rollout, trainer, mask = -torch.rand(2, 3), -torch.rand(2, 3), torch.ones(2, 3)
    settings = ImportanceSampling(corrector="mine")
    found = correct(rollout, trainer, mask, settings, resolve_corrector("mine", plugins))
    built_in = correct(rollout, trainer, mask, settings)
    torch.testing.assert_close(found.weights, built_in.weights.sqrt())


def test_every_marked_block_is_run():
    here = Path(__file__).read_text(encoding="utf-8")
    for page, text in PAGES.items():
        marked = re.findall(r"<!-- test: (\S+) -->\n```python", text)
        for name in set(marked) - RUN_ELSEWHERE:
            assert f'block("{name}")' in here, name
        assert len(fenced("python", text)) == len(marked), page


@pytest.mark.parametrize("page", ["README.md", "docs/nemo_rl.md"])
def test_nemo_rl_keys_are_read_where_they_stand(page):
    from nemo_rl_ext.config.guard import GuardConfig

    assert Recipe.from_dict(yaml.safe_load(fenced("yaml", RECIPE)[0])) != Recipe()
    text, *others = [text for text in fenced("yaml", PAGES[page]) if "policy:" in text]
    for other in others:
        assert yaml.safe_load(other)["policy"]["dtensor_cfg"] == {"fp8rl": "${fp8rl}"}
    config = yaml.safe_load(text)
    assert Recipe.from_dict(config["fp8rl"]) != Recipe()
    places = (
        config["policy"]["megatron_cfg"],
        config["policy"]["generation"]["vllm_cfg"],
        config["loss_fn"],
    )
    assert all(place["fp8rl"] == "${fp8rl}" for place in places)
    GuardConfig.from_dict(config["loss_fn"]["fp8rl_guard"], where="loss_fn.fp8rl_guard")


def test_tables_of_the_guard_and_of_the_hooks():
    from nemo_rl_ext.config.guard import GuardConfig

    described = {}
    for keys, defaults, _ in table("key | default", PAGES["docs/nemo_rl.md"]):
        values = [value.strip().strip("`") for value in defaults.split(",")]
        described |= dict(zip(quoted(keys), values, strict=True))
    assert described == {n: str(info.default) for n, info in GuardConfig.model_fields.items()}
    hooks = [quoted(row[0])[0].partition("(")[0] for row in table("hook |", EXTENDING)]
    specs = [n for n, f in vars(hookspecs).items() if hasattr(f, f"{hookspecs.PROJECT}_spec")]
    assert hooks == specs


def test_the_readme_can_be_read_at_once() -> None:
    """120 lines; tables of five and of three rows, of three columns, without brackets in cells."""
    assert len(README.splitlines()) <= 120
    rows = [line.strip("|").split(" | ") for line in README.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 5 + 2 + 3 and {len(row) for row in rows} == {3}
    cells = [cell.strip() for row in rows for cell in row]
    assert not [cell for cell in cells if len(cell) > 70 or set(cell) & set("[]()")]


def test_figures_of_the_readme_are_those_of_the_measurements() -> None:
    for page, rows in {
        "rollouts": ["| Qwen3-8B | H100 | FP8 | 10,236 | 17,382 | 1.70 | 1.36 |"],
        "nemo_rl": [
            "| Qwen3-8B, 256 sequences | one H200 | FP8 | 80.7 | 54.1 | 1.49 | 1.39 | 0.99 |"
        ],
        "refit": [
            "| Qwen3-8B | H100 | compiled, CUDA graphs | 26 |",
            "| Qwen3-8B, host slower | H100 | compiled, CUDA graphs | 42 |",
        ],
        "mismatch": ["| BF16 | BF16 | 1.7e-3 |", "cache (the default) | 2.7e-2 |"],
        "exact": ["(pretrained) | FP8 | local spec | 45,888 | 100% | 0 |"],
    }.items():
        text = PAGES[f"docs/measurements/{page}.md"]
        assert not [row for row in rows if row not in text], page
    told = ("1.70 times", "1.36 times", "1.49 times", "0.99 times", "26 ms", "42 ms", "0.027")
    assert not [figure for figure in told if figure not in README]
