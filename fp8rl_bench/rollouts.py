"""One rollout engine: its start, speed, memory, log-probabilities and refit.

Importing this module does not import vLLM; :func:`measure` runs it in this process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.errors import UnsupportedError
from fp8rl.models.folder import end_tokens
from fp8rl_bench.answers import LONGEST, chat_ids, compared
from fp8rl_bench.variants import KV_SCALE, engine_arguments, needs_scales

if TYPE_CHECKING:
    from fp8rl_bench.worker import Row

Load = tuple[int, int, int]
"""Requests, tokens in and tokens out of each."""
WARM_TOKENS = 64
SECONDS, LEAST, MOST = 20.0, 2, 5
"""The first engine runs a load until so many seconds are measured, so many times; the others as
often as the first."""
REFITS = 5
CALIBRATED = 64
"""Conversations from which KV scales are calibrated."""
AT_ONCE = 16
"""Answers that an engine scores at once: log-probabilities of prompts take much memory."""


def prepare() -> None:
    """Import what takes long, before this process has its turn on the GPU."""
    from vllm import LLM  # noqa: F401


def measure(job: dict[str, Any], row: Row) -> None:
    """Measure a variant and write what is found into its row, part by part.

    Args:
        job: ``variant``, ``model`` (a folder), ``random``, ``load``, ``memory``, ``device``,
            ``prompts`` (texts), ``answer_tokens``, ``calls`` (runs of the load, or None: as many
            as :data:`SECONDS` take), and ``folder`` for sampled answers.
    """
    variant = job["variant"]
    llm: Any = None
    with row.part("start", "starts an engine"):
        began = time.perf_counter()
        llm = start(job)
        row.found["start_seconds"] = time.perf_counter() - began
        if job["random"]:
            llm.apply_model(partial(give_weights, codes=variant.startswith("stock")))
            if needs_scales(variant):
                llm.apply_model(give_scales)
    if llm is None:
        return
    with row.part("memory", "reads its memory"):
        row.found |= memory(llm)
    if not job["random"]:
        answers(job, row, llm)
    with row.part("speed", "generates"):
        found = speeds(llm, tuple(job["load"]), job["words"], job["calls"])
        row.found["tokens_per_second"] = found
    if variant.startswith("fp8rl"):
        with row.part("refit", "takes new weights"):
            row.found["refit_seconds"] = refits(llm)[1:]


def start(job: dict[str, Any]) -> Any:
    """Start the engine of a job."""
    from vllm import LLM

    count, length, tokens = job["load"]
    longest = max(length + tokens, LONGEST + job["answer_tokens"] + 1)
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 29}
    return LLM(
        job["model"],
        load_format="dummy" if job["random"] else "auto",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=min(longest, job["positions"]),
        max_num_seqs=count,
        gpu_memory_utilization=job["memory"],
        enable_prefix_caching=False,
        seed=0,
        **(on_cpu if job["device"] == "cpu" else {}),
        **engine_arguments(job["variant"], trained=not job["random"]),
    )


def prompts(
    count: int, length: int, samples: int = 1, words: int = 150_000
) -> list[dict[str, list[int]]]:
    """Return prompts without meaning, the same in every run."""
    return [
        {"prompt_token_ids": [(i // samples * 7919 + j * 104729) % words for j in range(length)]}
        for i in range(count)
    ]


def tokens_per_second(
    llm: Any,
    load: Load,
    tokens: int,
    *,
    samples: int = 1,
    logprobs: bool = False,
    words: int = 150_000,
) -> float:
    """Return output tokens per second of one ``generate`` call."""
    from vllm import SamplingParams

    inputs = prompts(*load[:2], samples, words)
    sampling = SamplingParams(
        max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
    )
    if samples > 1:  # as NeMo RL does after each refit
        llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def speeds(llm: Any, load: Load, words: int, calls: int | None) -> list[float]:
    """Return output tokens per second of calls after a shorter one; None: for some seconds."""
    measure = partial(tokens_per_second, llm, load, words=words)
    measure(min(WARM_TOKENS, load[2]))
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < (calls or LEAST) or (
        calls is None and time.perf_counter() - began < SECONDS and len(found) < MOST
    ):
        found.append(measure(load[2]))
    return found


def give_weights(model: Any, codes: bool) -> None:
    """Set norms to 1, and with ``codes`` write FP8 codes of every size.

    vLLM's dummy loader leaves near nothing in norms and mostly zeros in its own FP8 layers; on such
    activations and weights a GPU draws less power and runs faster than on a model's.

    With experts the embedding is large beside what layers add to it. Else attention, which takes
    the mean of all positions here, makes the tokens alike, and on a CPU 256 of them visit 44 of 128
    experts in the last layers (on a GPU speeds hardly differ).
    """
    import torch

    parameters = dict(model.named_parameters())
    mixture = any(".experts." in name for name in parameters)
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        elif mixture and name.endswith("embed_tokens.weight"):
            parameter.data.uniform_(-1, 1)
        elif not codes:
            continue
        elif parameter.dtype == torch.float8_e4m3fn:
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            parameter.data.copy_(made.uniform_(-448, 448))
        elif name.endswith("weight_scale_inv"):
            parameter.data.fill_(1e-3 / 448)


def give_scales(model: Any) -> None:
    """Set KV scales that fit the values of these weights."""
    from vllm_fp8rl.calibration import set_uncalibrated_kv_scales

    set_uncalibrated_kv_scales(model, KV_SCALE)


def memory(llm: Any) -> dict[str, float]:
    """Return bytes of the weights, bytes of a token in the cache, and how many tokens it holds."""
    import torch

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size

    def held(tensors: Any) -> int:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    model = runner.get_model()
    caches: list[torch.Tensor] = []
    for layer in runner.kv_caches:
        caches += layer if isinstance(layer, (list, tuple)) else [layer]
    return {
        "weight_bytes": held([*model.parameters(), *model.buffers()]),
        "cache_bytes_per_token": held(caches) / tokens,
        "cache_tokens": tokens,
    }


def answers(job: dict[str, Any], row: Row, llm: Any) -> None:
    """Sample answers to real prompts; compare engines on those of BF16."""
    folder, variant = Path(job["folder"]), job["variant"]
    given: dict[str, Any] | None = None
    if (folder / "bf16.answers.json").is_file():
        given = json.loads((folder / "bf16.answers.json").read_text(encoding="utf-8"))
    with row.part("answers", "answers real prompts"):
        asked, ends = _asked(job)
        scales: dict[str, float] = {}
        if needs_scales(variant):
            scales = _calibrate(llm, asked, given)
        sampled = sample(llm, asked, job["answer_tokens"], ends) | {"scales": scales}
        file = folder / f"{variant}.answers.json"
        file.write_text(json.dumps(sampled), encoding="utf-8")
        given = sampled if variant == "bf16" else given
    if given is not None:
        with row.part("engines", "scores the answers of vLLM in BF16"):
            row.found["engines"] = compared(given["logprobs"], scored(llm, given))


def _asked(job: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Return the prompts as token numbers, and the tokens that end an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    asked = [chat_ids(tokenizer, text) for text in job["prompts"]]
    return asked, end_tokens(Path(job["model"]), tokenizer.eos_token_id)


def _calibrate(
    llm: Any, asked: Sequence[list[int]], given: dict[str, Any] | None
) -> dict[str, float]:
    from vllm_fp8rl.calibration import calibrate_kv_scales

    texts = list(asked)
    if given is not None:
        texts = [p + a for p, a in zip(given["prompts"], given["answers"], strict=True)]
    whole = [{"prompt_token_ids": text} for text in texts[:CALIBRATED]]
    return {name: float(scale) for name, scale in calibrate_kv_scales(llm, whole).items()}


def sample(
    llm: Any, asked: Sequence[list[int]], tokens: int, ends: Sequence[int]
) -> dict[str, Any]:
    """Return prompts, answers at temperature 1 and the log-probabilities of their tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=tokens, stop_token_ids=list(ends), detokenize=False, logprobs=0, temperature=1.0
    )
    given: Any = [{"prompt_token_ids": list(prompt)} for prompt in asked]
    found = [output.outputs[0] for output in llm.generate(given, sampling, use_tqdm=False)]
    return {
        "prompts": [list(prompt) for prompt in asked],
        "answers": [list(answer.token_ids) for answer in found],
        "logprobs": [
            [step[token].logprob for step, token in zip(a.logprobs, a.token_ids, strict=True)]
            for a in found
        ],
    }


def scored(llm: Any, given: dict[str, Any]) -> list[list[float]]:
    """Return an engine's log-probabilities of the tokens of given answers."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    pairs = list(zip(given["prompts"], given["answers"], strict=True))
    found = []
    for first in range(0, len(pairs), AT_ONCE):
        part = pairs[first : first + AT_ONCE]
        texts: Any = [{"prompt_token_ids": prompt + answer} for prompt, answer in part]
        outputs = llm.generate(texts, sampling, use_tqdm=False)
        for (prompt, answer), output in zip(part, outputs, strict=True):
            steps = output.prompt_logprobs[len(prompt) :]
            found.append([s[token].logprob for s, token in zip(steps, answer, strict=True)])
    return found


def required_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every HF tensor that a refit of the model requires, by name."""
    from vllm_fp8rl.refit.receiver.inventory import Inventory

    entries = Inventory.of(model).entries.items()
    return {name: entry.shape for name, entry in entries if entry.required}


def sender_size(sizes: Collection[int], free: float) -> int:
    """Return how many elements of BF16 a sender holds at once.

    Args:
        sizes: elements of the tensors that it sends.
        free: bytes of free memory, of which the engine keeps half for its own share of a refit.
    """
    largest, most = max(sizes), free // 4  # half of the bytes, two for each element
    if largest > most:
        raise UnsupportedError(
            f"A refit needs {4 * largest / 2**30:.1f} GiB beside the engine, and the GPU has "
            f"{free / 2**30:.1f}; give --memory less."
        )
    # A batch has at most 256 MiB, so it and the next tensor lie apart wherever it ends.
    return int(min(max(1 << 30, 2 * largest + (1 << 28)), sum(sizes), most))


def refits(llm: Any) -> list[float]:
    """Return the seconds of refits with new weights that lie on the engine's device.

    The tensors of a batch lie apart; a later one may lie where an earlier one did. So the sender
    takes a few GiB and not the size of the model, and as much memory is read. Where less is free,
    tensors of a batch share memory too.
    """
    import torch

    from vllm_fp8rl.kv.scales import required_kv_scales
    from vllm_fp8rl.refit import refit

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    device = next(model.parameters()).device
    shapes = required_shapes(model)
    free = math.inf
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    size = sender_size([math.prod(shape) for shape in shapes.values()], free)
    memory = torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(-1e-3, 1e-3)
    names = sorted(required_kv_scales(model))
    scales = [(name, torch.tensor(KV_SCALE, device=device)) for name in names]

    def stream() -> Iterator[tuple[str, Any]]:
        place = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            place = 0 if place + count > size else place
            yield name, memory[place : place + count].view(shape)
            place += count
        yield from scales

    return [refit(llm, stream(), expect_kv_scales=bool(scales)).seconds for _ in range(REFITS + 1)]
