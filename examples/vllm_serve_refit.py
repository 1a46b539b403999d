"""Refit a running ``vllm serve`` over HTTP: ``python examples/vllm_serve_refit.py new-weights``.

The server (``VLLM_SERVER_DEV_MODE=1`` opens these routes, which ask for no key, so nobody but the
trainer may reach them: docs/vllm.md, "Who may reach the port")::

    VLLM_SERVER_DEV_MODE=1 vllm serve my-model --host 127.0.0.1 --quantization fp8rl \\
      --kv-cache-dtype fp8_e4m3 --generation-config vllm \\
      --additional-config '{"fp8rl": {"pins": {"last": 1}}}' \\
      --weight-transfer-config '{"backend": "fp8rl"}' \\
      --worker-extension-cls vllm_fp8rl.refit.receiver.worker.RefitWorker

The folder holds safetensors files with HF names, KV scales included, where every worker reads them
under the same path. Behind it another server may be named, e.g. http://127.0.0.1:8001.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

Post = Callable[..., Any]
"""``post(path, json=..., params=...)``; raises unless the server answers with success."""


def refit_over_http(post: Post, folder: str) -> None:
    """Pause, put the weights in, resume. After an error the server stays paused, because the
    weights may be half-updated: call this again with a complete folder."""
    post("/pause", params={"mode": "keep"})
    post("/init_weight_transfer_engine", json={"init_info": {}})
    try:
        post("/start_weight_update")
    except Exception:  # one whose sender died is still under way
        with contextlib.suppress(Exception):
            post("/update_weights", json={"update_info": {}})  # an error, which breaks it off
        post("/start_weight_update")
    post("/update_weights", json={"update_info": {"path": folder}})
    post("/finish_weight_update")
    # Requests that wait start over with the new weights, and no cached prefix is of the old ones.
    empty_cache(post, reset_running_requests=True)
    post("/resume")


def set_kv_scales(post: Post, scales: dict[str, float]) -> None:
    """KV scales by themselves, e.g. for a BF16 checkpoint before its first request."""
    answer = post("/collective_rpc", json={"method": "fp8rl_set_kv_scales", "args": [scales]})
    for worker in answer.json()["results"]:
        if worker["error"] is not None:
            raise RuntimeError(worker["error"])
    empty_cache(post)


def empty_cache(post: Post, **parameters: bool) -> None:
    """Empty the prefix cache and a KV connector's; the answer is 200 even where that failed."""
    answer = post("/reset_prefix_cache", params={"reset_external": True, **parameters})
    if answer.content and not answer.json()["success"]:  # vLLM 0.25.1 answers with nothing
        raise RuntimeError("The prefix cache was not emptied: something holds KV blocks.")


def poster(server: str) -> Post:
    def post(path: str, **arguments: Any) -> requests.Response:
        answer = requests.post(f"{server}{path}", timeout=600, **arguments)
        if not answer.ok:
            raise requests.HTTPError(f"{path} failed: {answer.text}", response=answer)
        return answer

    return post


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) not in (1, 2) or not list(Path(arguments[0]).glob("*.safetensors")):
        sys.exit("usage: python examples/vllm_serve_refit.py FOLDER_WITH_safetensors [SERVER]")
    server = arguments[1] if len(arguments) == 2 else "http://localhost:8000"
    try:
        refit_over_http(poster(server), str(Path(arguments[0]).resolve()))
    except requests.RequestException as error:
        sys.exit(f"The refit failed, and the server is paused if it runs: {error}")
