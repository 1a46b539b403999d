"""Run inside a row's environment: print as JSON what is installed and whether fp8rl refuses it."""

from __future__ import annotations

import json
import platform
import sys

import torch

from fp8rl import PluginManager
from fp8rl.errors import UnsupportedError


def _start_vllm() -> None:
    import vllm_fp8rl

    vllm_fp8rl.register()
    from vllm.model_executor.layers.quantization import get_quantization_config

    get_quantization_config("fp8rl").from_config({"quant_method": "fp8rl"})


def _start_megatron() -> None:
    from megatron_fp8rl import compat

    compat.check_forward_impl()


def main(engine: str) -> None:
    """Diagnose an engine as `fp8rl doctor` does, then go through the door that may refuse it."""
    plugins = PluginManager(strict=False)  # a row of one engine needs no other's plugin
    adapters = {adapter.name: adapter for adapter in plugins.engine_adapters()}
    if engine not in adapters:
        raise next(iter(plugins.broken.values()))
    diagnosis = adapters[engine].diagnose()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "engine": diagnosis.installed,
        "notes": list(diagnosis.problems),
        "refusal": None,
    }
    try:
        {"vllm": _start_vllm, "megatron": _start_megatron}[engine]()
    except UnsupportedError as error:
        found["refusal"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
