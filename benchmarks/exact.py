"""With ``exact``, are the rollout's sampled log-probabilities the trainer's, to the bit?

    python benchmarks/exact.py MODEL [--kv int8_per_token_head | auto] [--spec te] [--eager]
        [--tp 2 [--sp]] [--trace]

``MODEL`` is a folder of a pretrained Llama, Qwen3 or Qwen3-MoE with a chat template, or with
``--random-prompts`` one of ``real_model.py``. vLLM samples from real prompts in batches of many
sizes, over chunked and cached prompts and after refits; Megatron scores the same tokens, one
sequence at a time and packed. One Hopper GPU; with ``--tp 2`` two, which both engines share.
``--trace`` compares the layers of one prompt first, and names the first place that differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl_bench.answers import PROMPTS, chat_ids, compared
from fp8rl_bench.facts import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--kv", default="fp8_e4m3", help="fp8_e4m3, int8_per_token_head or auto")
    parser.add_argument("--exact", default="true", choices=("true", "false"))
    parser.add_argument("--spec", default="local", choices=("local", "te"), help="the trainer's")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--refits", type=int, default=3)
    parser.add_argument("--cache", type=float, default=3, help="GiB; 0.25 preempts 135M's requests")
    parser.add_argument("--random-prompts", action="store_true", help="words of no meaning")
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2), help="ranks of both engines")
    parser.add_argument("--sp", action="store_true", help="the trainer's sequence parallelism")
    parser.add_argument("--trace", action="store_true", help="implies --eager")
    parser.add_argument("--out", type=Path, default=Path("exact.json"))
    parser.add_argument("--rollouts", type=Path, help="used by the script itself")
    parser.add_argument("--scored", type=Path, help="used by the script itself")
    options = parser.parse_args()
    if options.sp and (options.tp == 1 or options.trace):
        parser.error("--sp needs --tp 2, and no --trace")
    options.eager |= options.trace
    recipe = Recipe.from_dict({"exact": options.exact == "true", "kv_cache": {"dtype": options.kv}})
    if options.rollouts:
        torch.save(sample(options, recipe), options.rollouts)
        return
    if options.scored:
        compare(options, recipe, torch.load(options.scored))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rollouts.pt")
        subprocess.run([sys.executable, *sys.argv, "--rollouts", str(file)], check=True)
        if options.tp == 1:
            compare(options, recipe, torch.load(file))
            return
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.tp}"]
        command = [sys.executable, *ranks, *sys.argv, "--scored", str(file)]
        subprocess.run(command, check=True, timeout=1800)


def compare(options: argparse.Namespace, recipe: Recipe, sampled: dict[str, Any]) -> None:
    """Score what was sampled and write what each run shows; of several ranks the first writes."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "model": options.model.name,
        "recipe": {"exact": recipe.exact, "kv_cache.dtype": options.kv},
        "spec": options.spec,
        "tensor_parallel_size": options.tp,
        "sequence_parallel": options.sp,
        "compiled": not options.eager,
        "start_s": sampled["start_s"],
        "versions": versions(),
        "runs": {},
    }
    for name, row in score(options, recipe, sampled):
        found["runs"][name] = row
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(f"{name}: {json.dumps(row)}\n")
            sys.stdout.flush()
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = found["runs"].values()
    if recipe.exact and any(min(row["equal"], row["packed_equal"]) < 1 for row in rows):
        sys.exit("exact does not hold: some log-probabilities differ.")


def sample(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Sample in an engine of this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # with experts vLLM 0.26 does not by itself
    from transformers import AutoConfig, AutoTokenizer
    from vllm import LLM, SamplingParams

    from vllm_fp8rl import engine_args
    from vllm_fp8rl.calibration import calibrate_kv_scales
    from vllm_fp8rl.refit import refit

    if options.random_prompts:
        make = torch.Generator().manual_seed(0)
        words = min(10_000, AutoConfig.from_pretrained(options.model).vocab_size)
        lengths = torch.randint(20, 60, (len(PROMPTS),), generator=make).tolist()
        prompts = [torch.randint(1, words, (n,), generator=make).tolist() for n in lengths]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompts = [chat_ids(tokenizer, prompt) for prompt in PROMPTS]
    several = options.tp > 1
    began = time.monotonic()
    llm = LLM(
        str(options.model),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=int(options.cache * 2**30),
        disable_log_stats=False,
        enforce_eager=options.eager,
        generation_config="vllm",
        skip_tokenizer_init=options.random_prompts,
        **({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if several else {}),
        **engine_args(recipe),
    )
    start = round(time.monotonic() - began, 1)
    scales = {}
    if recipe.kv_cache.has_scales:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts[:64]]
        scales = {name: float(s) for name, s in calibrate_kv_scales(llm, texts, margin=2.0).items()}

    def preempted() -> int:
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    def run(batch: list[list[int]], tokens: int) -> dict[str, Any]:
        before = preempted()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in batch],
            SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0),
            use_tqdm=False,
        )
        answers = [output.outputs[0] for output in outputs]
        return {
            "prompts": batch,
            "preempted": preempted() - before,
            "answers": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [step[token].logprob for step, token in zip(a.logprobs, a.token_ids, strict=True)]
                for a in answers
            ],
        }

    long = [list(chain(*prompts[i : i + 24]))[:1100] for i in range(8)]
    runs = {
        "256 requests": (0, run((prompts * 2)[:256], 96)),
        "64 requests": (0, run(prompts[:64], 96)),
        "7 requests": (0, run(prompts[:7], 96)),
        "1 request": (0, run(prompts[:1], 96)),
        "8 prompts of 1,100 tokens in chunks": (0, run(long, 200)),
        "8 prompts of 1,100 tokens from the cache": (0, run(long, 64)),
    }

    def send(seed: int) -> None:
        tensors = dict(moved(options.model, seed))
        tensors |= {name: torch.tensor([scale]) for name, scale in scales.items()}
        refit(llm, tensors.items(), expect_kv_scales=bool(scales))

    for seed in range(1, options.refits + 1):
        send(seed)
        runs[f"64 requests after refit {seed}"] = (seed, run(prompts[:64], 64))
    found = {"runs": runs, "scales": scales, "start_s": start}
    if options.trace:
        send(0)
        llm.reset_prefix_cache()
        with tempfile.TemporaryDirectory() as folder:
            llm.collective_rpc(_watch, args=(folder,))
            run(prompts[:1], 1)
            found["trace"] = {file.stem: torch.load(file) for file in Path(folder).glob("*.pt")}
    return found


def _watch(worker: Any, folder: str) -> None:
    """Let the first rank of an engine write what its embedding and its layers' halves give."""
    if worker.rank:
        return
    model = worker.model_runner.get_model().model

    def write(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        torch.save(output.cpu(), Path(folder, f"{name}.pt"))

    places = {"embedding": model.embed_tokens}
    for number, layer in enumerate(model.layers):
        places |= {f"{number}.attention": layer.self_attn, f"{number}.mlp": layer.mlp}
    for name, module in places.items():
        module.register_forward_hook(lambda *call, name=name: write(name, call[-1]))


def moved(model: Path, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors, moved a little by a seed as an optimizer would."""
    make = torch.Generator().manual_seed(seed)
    files = sorted(model.glob("*.safetensors"))
    for name, tensor in sorted(chain(*(load_file(file).items() for file in files))):
        if seed:
            noise = torch.randn(tensor.shape, generator=make) * (1e-3 * seed * tensor.float().std())
            tensor = (tensor.float() + noise).to(tensor.dtype)
        yield name, tensor


def score(
    options: argparse.Namespace, recipe: Recipe, sampled: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Score the sampled tokens with Megatron; yield what each run shows."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from fp8rl.kernels.vocabulary import shared_token_logprobs
    from fp8rl_bench.layers import build, shape_of
    from megatron_fp8rl import convert
    from megatron_fp8rl.export import load_hf
    from megatron_fp8rl.kv.cache import KVCacheInTraining
    from megatron_fp8rl.testing.exact_replay import alone
    from megatron_fp8rl.testing.local_spec import completed_local_spec

    config = json.loads((options.model / "config.json").read_text())
    make = build if options.spec == "local" else _te_model
    world = alone("cuda") if options.tp == 1 else _rank_of(options.tp)
    with world, completed_local_spec(), torch.no_grad():
        model = make(shape_of(config), sequence_parallel=options.sp)
        group = parallel_state.get_tensor_model_parallel_group()

        def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return shared_token_logprobs(logits, ids, group, 1024)[0].cpu()

        def padded(row: torch.Tensor) -> torch.Tensor:  # ranks have equal parts of a sequence
            return torch.nn.functional.pad(row, (0, len(row) % options.tp))[None]

        convert(model, recipe)
        model.eval()
        if recipe.kv_cache.dtype != "auto":
            cache = KVCacheInTraining(model, recipe.kv_cache.dtype)
            if sampled["scales"]:
                cache.set(sampled["scales"])
        if "trace" in sampled:
            load_hf([model], dict(moved(options.model, 0)))
            yield "trace", _traced(model, sampled)
        loaded = None
        for name, (seed, run) in sampled["runs"].items():
            if loaded != seed:
                load_hf([model], dict(moved(options.model, seed)))
                loaded = seed
            tokens = [
                torch.tensor(prompt + answer, device="cuda")
                for prompt, answer in zip(run["prompts"], run["answers"], strict=True)
            ]
            alone = []
            for ids, prompt in zip(tokens, run["prompts"], strict=True):
                places = torch.arange(len(ids), device="cuda")
                logits = model(padded(ids), padded(places), None)[0]
                rows = logits[len(prompt) - 1 : len(ids) - 1].contiguous()
                alone.append(token_logprobs(rows, ids[len(prompt) :]))
            row = {"preempted": run["preempted"], **compared(run["logprobs"], alone)}
            if recipe.exact:
                lengths = torch.tensor([0, *map(len, tokens)]).cumsum(0).int().cuda()
                longest = max(map(len, tokens))
                packed = PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=lengths,
                    cu_seqlens_kv=lengths,
                    max_seqlen_q=longest,
                    max_seqlen_kv=longest,
                )
                ids = torch.cat(tokens)
                places = torch.cat([torch.arange(len(x)) for x in tokens]).cuda()
                logits = model(padded(ids), padded(places), None, packed_seq_params=packed)[0]
                rows = [
                    torch.arange(int(a) + len(p) - 1, int(b) - 1)
                    for a, b, p in zip(lengths[:-1], lengths[1:], run["prompts"], strict=True)
                ]
                chosen = [token_logprobs(logits[r], ids[r + 1]) for r in rows]
                row["packed_equal"] = compared(run["logprobs"], chosen)["equal"]
            yield name, row


@contextmanager
def _rank_of(ranks: int) -> Iterator[None]:
    """This process of the script's own world, with a GPU of its own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _traced(model: Any, sampled: dict[str, Any]) -> dict[str, Any]:
    """Compare what the rollout's places gave for the first prompt, each after those before it."""
    prompt = next(iter(sampled["runs"].values()))[1]["prompts"][0]
    places = {"embedding": model.embedding}
    for number, layer in enumerate(model.decoder.layers):
        places |= {f"{number}.attention": layer.self_attention, f"{number}.mlp": layer.mlp}
    equal: dict[str, float] = {}

    def note(name: str, output: Any) -> None:
        ours = output[0] if isinstance(output, tuple) else output
        theirs = sampled["trace"][name][: len(prompt)].to(ours.device)
        equal[name] = (ours[: len(prompt), 0] == theirs).double().mean().item()

    hooks = [
        module.register_forward_hook(lambda *call, name=name: note(name, call[-1]))
        for name, module in places.items()
    ]
    ids = torch.tensor([prompt], device="cuda")
    model(ids, torch.arange(len(prompt), device="cuda")[None], None)
    for hook in hooks:
        hook.remove()
    first = next((name for name in places if equal[name] < 1), None)
    return {"first_that_differs": first, "equal": equal}


def _te_model(shape: SimpleNamespace, **overrides: Any) -> Any:
    """A GPTModel on the GPU, of TransformerEngine's spec as NeMo RL builds it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from fp8rl.models.spec import ModelSpec
    from megatron_fp8rl.testing.models import build_gpt

    experts = ModelSpec.of(shape).experts or None
    spec = get_gpt_layer_with_transformer_engine_spec(
        experts,
        moe_grouped_gemm=experts is not None,
        qk_layernorm=shape.model_type.startswith("qwen3"),
    )
    options = {
        "use_cpu_initialization": False,
        "bias_activation_fusion": True,
        "moe_grouped_gemm": experts is not None,
        **overrides,
    }
    return build_gpt(shape, transformer_layer_spec=spec, **options).cuda()


if __name__ == "__main__":
    main()
