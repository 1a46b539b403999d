"""Which modules of a Hugging Face model run in FP8, with which codes, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, PinError, RecipeError, UnsupportedError
from fp8rl.numerics import quantize_block
from fp8rl.recipe import Pins, WeightFormat
from support.hf import ALIGNED, RAGGED, convert_alone, hf_config, hf_model, loss_of
from support.numeric import relative_error
from torch_fp8rl import convert, export_hf
from torch_fp8rl.layers import Fp8Linear, Fp8Torch

SHAPES = {"aligned": ALIGNED, "ragged": RAGGED}
FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


def matrices(model: Any, shape: str) -> dict[str, torch.Tensor]:
    """What a rollout quantizes: HF tensors, joined where their blocks are not their own."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                prefix = name.replace("gate_up_proj", str(number))
                found[f"{prefix}.gate_proj"], found[f"{prefix}.up_proj"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{number}.down_proj": each for number, each in enumerate(tensor)}
        elif name.endswith("_proj.weight"):
            found[name.removesuffix(".weight")] = tensor
    if shape == "ragged":
        for fused, parts in FUSED:
            for first in [n for n in found if n.endswith(parts[0]) and ".experts." not in n]:
                prefix = first.removesuffix(parts[0])
                found[prefix + fused] = torch.cat([found.pop(prefix + part) for part in parts])
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("llama", torch.float32, "aligned"),
        ("qwen2", torch.bfloat16, "ragged"),
        ("qwen3", torch.float32, "ragged"),
        ("qwen3_moe", torch.bfloat16, "aligned"),
        ("qwen3_moe", torch.float32, "ragged"),
    ],
)
def test_codes_lie_on_the_blocks_of_the_rollout(kind: str, dtype: torch.dtype, shape: str):
    model = hf_model(kind, SHAPES[shape], dtype)
    for parameter in model.parameters():  # masters between the numbers of bfloat16
        parameter.data *= 1.001
    expected = {
        name: quantize_block(matrix.bfloat16(), scale_format="pow2")
        for name, matrix in matrices(model, shape).items()
    }
    before = {name: (t.dtype, t.shape) for name, t in model.state_dict().items()}
    conversion = convert_alone(model, Recipe(weights=WeightFormat(scale_format="pow2")))
    assert {name: (t.dtype, t.shape) for name, t in model.state_dict().items()} == before
    codes = conversion.weight_codes()
    assert set(codes) == set(expected)
    for name, (numbers, scale_inv) in codes.items():
        assert torch.equal(numbers.view(torch.uint8), expected[name].codes.view(torch.uint8)), name
        assert torch.equal(scale_inv, expected[name].scale_inv), name


@pytest.mark.parametrize(
    ("kind", "shape"), [("llama", "aligned"), ("qwen2", "ragged"), ("qwen3_moe", "ragged")]
)
def test_losses_and_gradients_are_near_float64(kind: str, shape: str):
    """As near as FP8 operands allow, and no nearer; test_layers.py looks at each product."""
    model = hf_model(kind, SHAPES[shape])
    truth = copy.deepcopy(model).double()
    truth.config._experts_implementation = "eager"  # the grouped one knows no float64
    convert_alone(model)
    losses = [loss_of(each) for each in (model, truth)]
    for loss in losses:
        loss.backward()
    assert 0 < (losses[0] - losses[1]).abs() < 0.02
    exact = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        # Experts differ by whole tokens where the router chooses another one.
        limit = 0.6 if kind == "qwen3_moe" else 0.3
        assert 0.005 < relative_error(parameter.grad, exact[name].grad) < limit, name


def test_pinned_modules_keep_their_class_and_bits():
    model = hf_model()
    untouched = copy.deepcopy(model)
    pins = Pins(last=1, kinds=("o_proj",), names=("model.layers.0.mlp.down_proj",))
    conversion = convert_alone(model, Recipe(pins=pins))
    linears = [name for name, module in model.named_modules() if isinstance(module, Fp8Torch)]
    parts = [f"self_attn.{each}_proj" for each in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    assert linears == [f"model.layers.0.{part}" for part in parts]
    assert list(conversion.modules) == [
        f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    ]
    x = torch.randn(1, 16, 256, dtype=torch.bfloat16)
    untrained = convert_alone(untouched, Recipe(training=False))
    assert not untrained.modules and untrained.policy.precision("lm_head") == "bf16"
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear
    assert torch.equal(model.model.layers[1].mlp(x), untouched.model.layers[1].mlp(x))


def wrapped(model: nn.Module) -> nn.Module:
    """As DDP and a value head wrap it."""
    outer = nn.Module()
    outer.add_module("module", model)
    return outer


class Lora(nn.Module):
    """As PEFT lays an adapter over a linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear.requires_grad_(False)
        self.lora_A = nn.Linear(linear.in_features, 4, bias=False, dtype=torch.bfloat16)
        self.lora_B = nn.Linear(4, linear.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_adapters(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj)
    outer = nn.Module()
    outer.add_module("base_model", nn.Module())
    outer.base_model.model = model
    return outer


@pytest.mark.parametrize("first", ["convert", "adapt"])
def test_adapters_lie_over_fp8_weights(first: str):
    model = hf_model()
    outer = with_adapters(model) if first == "adapt" else None
    convert_alone(outer or model)
    outer = outer or with_adapters(model)
    loss_of(model).backward()
    adapter = model.model.layers[0].self_attn.k_proj
    assert type(adapter.base_layer) is Fp8Linear and type(adapter.lora_A) is nn.Linear
    assert adapter.base_layer.weight.grad is None and adapter.lora_A.weight.grad is not None
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\.self_attn\.k_proj\.lora_A\.weight' is an"
    ):
        next(export_hf(outer))


@pytest.mark.parametrize(
    "build",
    [
        lambda: AutoModel.from_config(hf_config("qwen3"), dtype=torch.bfloat16),
        lambda: wrapped(hf_model()),
        lambda: torch.compile(hf_model(), backend="eager"),
    ],
    ids=["without a head", "wrapped", "compiled"],
)
def test_modules_are_found_within_wrappers(build: Callable[[], nn.Module]):
    names = convert_alone(build()).modules
    leaves = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert list(names) == [f"model.layers.{n}.{leaf}" for n in range(2) for leaf in leaves]


def test_a_copy_has_matrices_of_its_own():
    model = hf_model()
    convert_alone(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data *= 1.5
    first, second = loss_of(model), loss_of(other)
    assert loss_of(model) == first != second
    second.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is None
    assert other.model.layers[0].self_attn.k_proj.weight.grad is not None


def of_another_family() -> nn.Module:
    config = hf_config("gemma2", bos_token_id=None, eos_token_id=1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def changed(change: Callable[[Any], object], kind: str = "qwen3") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = hf_model(kind)
        change(model)
        return model

    return build


class Adapter(nn.Linear):
    pass


def with_a_subclass(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.__class__ = Adapter


def quantized(model: Any) -> None:
    model.quantization_method = "bitsandbytes"


def transposed(model: Any) -> None:
    model.model.layers[0].mlp.experts.is_transposed = True


@pytest.mark.parametrize(
    ("build", "recipe", "error", "words"),
    [
        (hf_model, {}, RecipeError, r"is a dict; make one with Recipe\.load"),
        (hf_model, Recipe(pins=Pins(layers=(9,))), PinError, "9 matches nothing"),
        (
            lambda: hf_model("qwen3_moe"),
            Recipe(pins=Pins(names=("*.experts.*.down_proj",))),
            PinError,
            r"pins\.names.*experts\.0\.down_proj' but not all experts of 'model\.layers\.0",
        ),
        (hf_model, Recipe(exact=True), UnsupportedError, "exact needs Megatron's trainer"),
        *(
            (build, Recipe(), UnsupportedError, words)
            for build, words in (
                (lambda: nn.Linear(2, 2), "Linear has no config"),
                (of_another_family, "'gemma2' is not served.*training to false"),
                (changed(convert_alone), "q_proj' runs in FP8 already"),
                (changed(with_a_subclass), r"1\.self_attn\.v_proj' is a Adapter"),
                (changed(lambda m: m.model.layers.pop(1)), r"no 'model\.layers\.1\.self_attn"),
                (changed(quantized), r"is quantized \(bitsandbytes\)"),
                (changed(transposed, "qwen3_moe"), r"\['is_transposed'\]; FP8 training knows"),
                (lambda: hf_model(dtype=torch.float16), r"q_proj\.weight' is torch\.float16; load"),
            )
        ),
    ],
)
def test_refusals(build: Callable, recipe: Any, error: type[Fp8RLError], words: str):
    model = build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error, match=words):
        convert(model, recipe)
    assert [type(module) for module in model.modules()] == classes


def test_ragged_widths_are_told(caplog: pytest.LogCaptureFixture):
    lines: list[str] = []
    convert_alone(hf_model(), report=lines.append)
    assert len(lines) == 1 and "precision of each module" in lines[0] and not caplog.records
    convert_alone(hf_model("qwen3_moe", RAGGED))
    assert "experts" in caplog.text and "tensor_parallel_size=1" in caplog.text
