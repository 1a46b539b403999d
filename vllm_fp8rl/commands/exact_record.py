"""The rollout's half of ``fp8rl exact``: sample, and write down what each module took and gave.

Importing this module imports no engine; :func:`record` starts one in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from fp8rl.errors import Fp8RLError, ModelError, UnsupportedError
from fp8rl.models.folder import folder_config
from fp8rl.plugins.adapters import ExactRequest
from vllm_fp8rl import engine_args

_TOKENS = 32  # of each answer
_LENGTH = 200  # of a prompt, at most
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_MODULES = (
    *("input_layernorm", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm"),
    *("self_attn.attn", "self_attn.o_proj", "post_attention_layernorm", "mlp"),
)
"""Of a decoder layer of Llama's and Qwen3's families. The rotation lies between two of them, and is
one module of all layers."""


def record(request: ExactRequest) -> None:
    """Write a dictionary with torch: ``device``; ``scales``; ``modules``, name -> inputs, outputs;
    ``traced``, what the modules ran: token numbers, and how many were sampled; ``answers``,
    token numbers and log-probabilities of a batch.

    Raises:
        UnsupportedError: the engine has no such modules, or does not start with the recipe.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(_record_alone, request).result()


def _record_alone(request: ExactRequest) -> None:
    try:
        _record(request)
    except Fp8RLError:
        raise
    except Exception as error:  # not all of vLLM's can be sent to another process
        raise UnsupportedError(
            f"vLLM did not run the model ({type(error).__name__}: {error}); its log is above."
        ) from None


def _record(request: ExactRequest) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if request.recipe.exact and torch.cuda.is_available():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # with experts vLLM takes the first
    from vllm import LLM, SamplingParams

    from vllm_fp8rl.calibration import calibrate_kv_scales

    prompt = _prompt_length(folder_config(request.model))
    llm = LLM(
        model=str(request.model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        max_model_len=prompt + _TOKENS,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.05,
        **engine_args(request.recipe),
    )
    texts = _tokens(request, llm.model_config.get_vocab_size(), prompt)
    prompts: Any = [{"prompt_token_ids": text} for text in texts]
    sampling = SamplingParams(
        max_tokens=_TOKENS, ignore_eos=True, detokenize=False, logprobs=0, temperature=1.0
    )
    try:
        scales = {}
        if request.recipe.kv_cache.has_scales:
            scales = dict(calibrate_kv_scales(llm, prompts))
        answers = _answers(llm.generate(prompts, sampling, use_tqdm=False))
        seen: dict[str, list[Any]] = {}
        llm.reset_prefix_cache()
        llm.apply_model(partial(_watch, seen=seen))
        longest = max(prompts, key=lambda prompt: len(prompt["prompt_token_ids"]))
        (traced,) = _answers(llm.generate(longest, sampling, use_tqdm=False))
    finally:
        llm.llm_engine.engine_core.shutdown()
    modules = {
        name: tuple(_joined([call[side] for call in calls]) for side in (0, 1))
        for name, calls in seen.items()
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {"device": device, "scales": scales, "modules": modules}
    torch.save(found | {"traced": traced, "answers": answers}, request.record)


def _prompt_length(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a prompt, with positions left for its answer."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return _LENGTH
    if positions < _TOKENS + 2:
        raise ModelError(
            f"The model's max_position_embeddings is {positions}, too few for a prompt and an "
            f"answer of {_TOKENS} tokens; give a model with more."
        )
    return min(_LENGTH, positions - _TOKENS)


def _tokens(request: ExactRequest, words: int, length: int) -> list[list[int]]:
    """Return prompts of at most ``length`` tokens; random ones for a folder without a tokenizer."""
    if any((request.model / name).is_file() for name in _TOKENIZERS):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(request.model)
        found = [tokenizer(prompt)["input_ids"][:length] for prompt in request.prompts]
        return [prompt for prompt in found if prompt]
    make = torch.Generator().manual_seed(0)
    lengths = [max(2, min(len(prompt), length)) for prompt in request.prompts]
    return [torch.randint(words, (each,), generator=make).tolist() for each in lengths]


def _answers(outputs: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Return the tokens of each request, and the log-probabilities of those that were sampled."""
    found = []
    for output in outputs:
        (answer,) = output.outputs
        chosen = zip(answer.logprobs, answer.token_ids, strict=True)
        logprobs = torch.tensor([of[token].logprob for of, token in chosen])
        found.append(([*output.prompt_token_ids, *answer.token_ids], logprobs))
    return found


def _watch(model: torch.nn.Module, seen: dict[str, list[Any]]) -> None:
    """Note what modules take and give in each step; some kernels write into their inputs."""
    modules = dict(model.named_modules())
    layers = range(len(modules["model.layers"]))  # type: ignore[arg-type]
    names = [f"model.layers.{layer}.{leaf}" for layer in layers for leaf in _MODULES]
    for name in ("model.embed_tokens", *names, "model.norm", "logits_processor"):
        if name not in modules:
            if name.endswith(("q_norm", "k_norm")):  # Qwen3's alone
                continue
            raise UnsupportedError(
                f"This model has no '{name}' in vLLM, so its modules cannot be compared; choose "
                "one of Llama's or Qwen3's family."
            )
        modules[name].register_forward_pre_hook(partial(_took, seen.setdefault(name, [])))
        modules[name].register_forward_hook(partial(_gave, seen[name]))


def _took(calls: list[Any], module: Any, args: Any) -> None:
    calls.append([_copied(args)])


def _gave(calls: list[Any], module: Any, args: Any, output: Any) -> None:
    calls[-1].append(_copied(output if isinstance(output, (tuple, list)) else [output]))


def _copied(values: Any) -> list[torch.Tensor]:
    return [x.detach().clone().cpu() for x in values if isinstance(x, torch.Tensor)]


def _joined(calls: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Join the tensors of several steps by tokens."""
    return [torch.cat(each) for each in zip(*calls, strict=True)]
