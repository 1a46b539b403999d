"""README, docs and the rest of the papers: names import, files are there, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
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


def test_folders_of_the_architecture_are_there() -> None:
    """Names of files in the table of folders are relative to the package and the folder."""
    text = PAPERS["docs/architecture.md"]
    table = text.split("| package | folder | what is in it |")[1].split("\n\n")[0]
    packages: list[str] = []
    problems, files = [], 0
    for line in table.splitlines()[2:]:
        first, cell, content = (text.strip() for text in line.split("|")[1:4])
        packages = re.findall(r"`([^`]+)`", first) or packages
        folders = re.findall(r"`([^`]+)`", cell)
        paths = [f"{package}/{name}" for package in packages for name in folders]
        problems += [path for path in paths if not (ROOT / path).exists()]
        inside = [name for name in folders if name.endswith("/")]
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", content):
            files += 1
            if not any((ROOT / packages[0] / folder / name).exists() for folder in (*inside, "")):
                problems.append(f"{packages[0]}/{cell}: {name}")
    assert files > 30
    assert not problems


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


@pytest.mark.parametrize("page", PAPERS)
def test_lines_of_code_fit_beside_the_navigation(page: str) -> None:
    """docs/assets/site.css makes room for 100 columns."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", PAPERS[page], re.M | re.S)
    assert not [line for code in blocks for line in code.splitlines() if len(line) > 100]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    pages = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    named = set(re.findall(r"[\w/]+\.md", nav))
    assert pages <= named
    # tools/site_hooks.py makes pages of them; one named README.md would replace the start page.
    beside = {"readme.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert {name for name in named if not (DOCS / name).exists()} <= beside
    assert re.findall(r"[\w/]+\.md", nav)[0] == "index.md"


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://user:secret@example.org/team/fp8rl.git", "https://example.org/team/fp8rl"),
        ("git@example.org:team/fp8rl.git", "https://example.org/team/fp8rl"),
        ("ssh://git@example.org/team/fp8rl", "https://example.org/team/fp8rl"),
        ("/srv/fp8rl", None),
        ("", None),
    ],
)
def test_the_site_links_to_the_clones_origin_without_its_password(
    remote: str, page: str | None
) -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "tools" / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.repository_url(remote) == page


def test_search_of_the_site_needs_no_network() -> None:
    """In pages that are opened as files; what the plugin takes by itself is a download."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"search", "offline"} <= {name for name in site["plugins"] if isinstance(name, str)}
    (shim,) = site["extra"]["polyfills"]
    assert "iframe-worker" in shim and (DOCS / shim).is_file()
