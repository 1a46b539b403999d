"""README, docs and the rest of the papers: names import, files are there, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import reference
import site_hooks
from quickstart_notebook import FILE, notebook

from fp8rl import Recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAPERS = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        ROOT / "tests" / "gpu" / "README.md",
        *sorted(DOCS.rglob("*.md")),
    )
}
FOLDERS = {
    "fp8rl": "plugins/fp8rl",
    "fp8rl_bench": "fp8rl_bench",
    **{
        name: name
        for name in ("vllm_fp8rl", "megatron_fp8rl", "torch_fp8rl", "nemo_rl_ext", "fp8rl_demo")
    },
}
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w*)+(?![\w/-])")
PATH = re.compile(
    r"(?<![\w./-])(?:plugins|vllm_fp8rl|megatron_fp8rl|nemo_rl_ext|fp8rl_bench|fp8rl_demo|tests|benchmarks"
    r"|examples|recipes|tools)/[\w./-]+\.(?:py|md|yaml|json)\b"
)
PUBLISHED = (
    "fp8rl.Recipe.load",
    "vllm_fp8rl.engine_args",
    "vllm_fp8rl.refit.refit",
    "vllm_fp8rl.refit.receiver.worker.RefitWorker",
    "vllm_fp8rl.refit.worker.RefitWorker",
    "megatron_fp8rl.convert",
    "megatron_fp8rl.Conversion",
    "megatron_fp8rl.export.export_hf",
    "megatron_fp8rl.export.fp8_wire",
    "megatron_fp8rl.kv_cache.KVCacheInTraining",
    "megatron_fp8rl.kv_cache.KVCacheInTraining.set",
    "megatron_fp8rl.observers.QKVObserver",
    "megatron_fp8rl.observers.QKVObserver.scales",
    "nemo_rl_ext.GRPOConfig",
    "nemo_rl_ext.GRPOLoss",
    "nemo_rl_ext.group_relative_advantages",
)
"""What READMEs of this project have told people to import."""
UPSTREAM = ("examples/run_", "examples/configs/")
"""How paths in NeMo RL's clone begin."""
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")


def missing(name: str) -> str | None:
    """None if a dotted name is a module, something in one, or a key of a recipe."""
    parts = name.split(".")
    if parts[0] == "fp8rl" and parts[1] in Recipe.model_fields:
        return None  # such as fp8rl.training in a YAML
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:  # of a parent
            continue
        if length == len(parts):
            return None
        found = importlib.import_module(module)
        for part in parts[length:]:
            if not hasattr(found, part):
                return f"{name}: '{module}' has no '{part}'"
            found = getattr(found, part)
        return None
    return f"{name}: no such module"


def current(page: str, text: str) -> str:
    """The text without the first column of the changelog's table, whose names are gone."""
    return re.sub(r"^\| `[^|]*\|", "|", text, flags=re.M) if page == "CHANGELOG.md" else text


def imported(page: str) -> list[str]:
    """Names that the Python blocks of a page import from this project."""
    names = []
    for code in re.findall(r"^```python\n(.*?)^```", PAPERS[page], re.M | re.S):
        tree = compile(code, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in FOLDERS:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def heading_anchors(text: str) -> set[str]:
    """Anchors that GitHub makes of headings; mkdocs makes the same of those used here."""
    found: set[str] = set()
    for line in FENCE.sub("", text).splitlines():
        if match := re.match(r"#+ (.*)", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).lower()
            found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAPERS)
def test_names_files_and_links_of_a_page_lead_somewhere(page: str) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    text = current(page, PAPERS[page])
    named = {*DOTTED.findall(text), *imported(page)}
    problems = [problem for problem in map(missing, sorted(named)) if problem]
    for path in PATH.findall(text):
        if not path.startswith(UPSTREAM) and not (ROOT / path).exists():
            problems.append(path)
    for target, anchor in LINK.findall(FENCE.sub("", PAPERS[page])):
        file = (ROOT / page).parent / target if target else ROOT / page
        if not file.exists():
            problems.append(target)
        elif anchor and anchor not in heading_anchors(file.read_text(encoding="utf-8")):
            problems.append(f"{target}#{anchor}")
    # docs/assets/site.css makes room for 100 columns beside the navigation.
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", PAPERS[page], re.M | re.S)
    problems += [line for code in blocks for line in code.splitlines() if len(line) > 100]
    assert not problems


def test_the_notebook_of_the_quickstart_is_made_from_its_page() -> None:
    assert FILE.read_text(encoding="utf-8") == notebook()
    cells = json.loads(notebook())["cells"]
    commands = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for command in re.findall(r"^(?:fp8rl|pip|uv run) .*$", PAPERS["docs/quickstart_gpu.md"], re.M):
        assert sum(command in source for source in commands) == 1, command


def removed(text: str) -> set[str]:
    """Names in the first column of the changelog's tables."""
    rows = re.findall(r"^\| (`[^|]*)\|", text, re.M)
    return {name for row in rows for name in DOTTED.findall(row)}


def test_what_a_readme_once_named_is_there_or_is_removed_and_has_a_successor() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    changes = PAPERS["CHANGELOG.md"]
    assert not [name for name in removed(changes) if not missing(name)]
    gone = removed(changes.split("\n### Removed\n")[1].split("\n\n#")[0])
    assert gone
    assert not [name for name in PUBLISHED if (missing(name) is None) == (name in gone)]


def braces_expanded(text: str) -> list[str]:
    """``a.{b, c}`` as ``a.b`` and ``a.c``."""
    found = re.search(r"\{([^{}]*,[^{}]*)\}", text)
    if found is None:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    choices = (before + choice.strip() + after for choice in found[1].split(","))
    return [full for choice in choices for full in braces_expanded(choice)]


def test_every_import_of_an_engine_is_on_its_page_of_upgrading() -> None:
    """Whoever raises an engine's version finds there what may have moved."""
    problems, imported = [], 0
    for packages, engines, pages in (
        (("vllm_fp8rl", "nemo_rl_ext"), ("vllm",), ("", "_nemo_rl")),
        (("megatron_fp8rl",), ("megatron", "transformer_engine"), ("_megatron",)),
        (("nemo_rl_ext",), ("nemo_rl",), ("_nemo_rl",)),
    ):
        text = "".join(FENCE.sub("", PAPERS[f"docs/upgrading{page}.md"]) for page in pages)
        codes = [
            full for code in re.findall(r"`([^`\n]+)`", text) for full in braces_expanded(code)
        ]
        known = {word for code in codes for word in re.findall(r"\w+", code)}
        files = (file for package in packages for file in (ROOT / package).rglob("*.py"))
        for file in (file for file in files if "testing" not in file.parts):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in engines:
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.Import):
                    found = [alias.name.split(".") for alias in node.names]
                    names = [parts[-1] for parts in found if parts[0] in engines]
                else:
                    continue
                imported += len(names)
                problems += [f"{file.relative_to(ROOT)}: {n}" for n in names if n not in known]
    assert imported > 100
    assert not problems


def test_the_site_links_to_the_clones_origin_without_its_password() -> None:
    for remote, page in (
        ("https://user:secret@example.org/team/fp8rl.git", "https://example.org/team/fp8rl"),
        ("git@example.org:team/fp8rl.git", "https://example.org/team/fp8rl"),
        ("ssh://git@example.org/team/fp8rl", "https://example.org/team/fp8rl"),
        ("/srv/fp8rl", None),
        ("", None),
    ):
        assert site_hooks.repository_url(remote) == page


# docs/reference.md


def test_the_reference_is_what_the_code_gives() -> None:
    text = reference.FILE.read_text(encoding="utf-8")
    assert text == reference.reference(), "run tools/reference.py"


def test_every_metric_and_variable_has_a_meaning() -> None:
    known = {*reference.MismatchMetrics.__dataclass_fields__, *reference.CORRECTION}
    assert reference.emitted_metrics() == known | {*reference.LOSS}
    for names, file in (
        (reference.DRIVER, "nemo_rl_ext/driver/batch_correction.py"),
        (reference.REPLAY, "megatron_fp8rl/router_replay.py"),
        (reference.KV_CACHE, "plugins/fp8rl/training/kv.py"),
    ):
        code = (ROOT / file).read_text(encoding="utf-8")
        assert not [name for name in names if f'"{name}"' not in code], file
    files = [file for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*.py")]
    read = {
        name
        for file in [*files, ROOT / "tools" / "install.py"]
        for name in re.findall(r'"(FP8RL_[A-Z_]+)"', file.read_text(encoding="utf-8"))
        if not name.startswith("FP8RL_TEST_")
    }
    assert read == set(reference.ENVIRONMENT)


# docs/measurements/reliability.md and fuzz.md


def test_every_pain_is_proven_by_a_test_that_is_there() -> None:
    page = PAPERS["docs/measurements/reliability.md"]
    rows = {int(n): row for n, row in re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M)}
    assert list(rows) == list(range(1, 22))
    assert all("::test_" in row or "benchmarks/results/" in row for row in rows.values())
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 21
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
    run = json.loads((ROOT / "benchmarks" / "results" / "reliability_cpu.json").read_text())
    told = f"`{run['command']}`: {run['seconds'] / 60:.0f} minutes, no failure"
    assert told in PAPERS["docs/measurements/fuzz.md"]
    assert min(run["counts"][what] for what in ("exports of sources that change", "senders killed"))
