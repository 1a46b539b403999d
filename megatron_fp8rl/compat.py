"""Everything that depends on the version of megatron-core, imported when it is used."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fp8rl.errors import UnsupportedError
from fp8rl.plugins.adapters import version_of

SUPPORTED_VERSIONS = ("0.16.1", "0.16.0", "0.19.2", "0.20.0")
"""Releases, and the commit that Megatron-Bridge and NeMo RL pin (Megatron-LM 2a75ac1, 0.20.0).

The first is the newest for Python 3.11; pip takes 0.19.2 for later ones.
"""

CUDA_GRAPHS = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
"""Options of ``TransformerConfig``, of several versions, that capture forwards in CUDA graphs."""

OLDEST = (0, 16)
"""Before it ``TransformerConfig`` and ``Attention`` lack options that conversion and specs read."""

NEEDS_TRITON = (0, 18)
"""From here on ``import megatron.core`` fails without Triton, also on a CPU."""

_FORWARD_IMPL_ARGUMENTS = {
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "tp_group",
    "grad_output_buffer",
    "wgrad_deferral_limit",
}
# Arguments of newer versions, with the value that requests nothing.
_OPTIONS = {"grad_output_buffer": "defer_embedding_wgrad_compute"}
_NEUTRAL = {"async_grad_allreduce": None, "gtp_remat_size": 1, "output_dtype": None}


def installed_version() -> str | None:
    """Return the version of megatron-core on this machine, or None."""
    return version_of("megatron-core")


def lacks_triton(release: str) -> bool:
    """Tell whether megatron-core of this release cannot be imported here for want of Triton."""
    return _numbers(release) >= NEEDS_TRITON and importlib.util.find_spec("triton") is None


def _numbers(release: str) -> tuple[int, ...]:
    """Return the first two numbers of a release."""
    return tuple(map(int, release.split(".")[:2]))


def check_forward_impl() -> None:
    """Check the release, and that the methods this package overrides are the known ones.

    ``ColumnParallelLinear._forward_impl`` and ``RowParallelLinear._forward_impl``
    (tensor_parallel/layers.py) must exist, and ``forward`` must call them with known arguments.
    """
    import megatron.core
    from megatron.core.tensor_parallel import layers

    release = megatron.core.__version__
    if _numbers(release) < OLDEST:
        raise UnsupportedError(
            f"megatron_fp8rl serves megatron-core {'.'.join(map(str, OLDEST))} and later, but "
            f"{release} is installed; install megatron-core {SUPPORTED_VERSIONS[0]}."
        )

    known = set(
        inspect.signature(layers.linear_with_grad_accumulation_and_async_allreduce).parameters
    )
    missing = sorted(_FORWARD_IMPL_ARGUMENTS - known)
    for cls in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        if "_forward_impl" not in vars(cls):
            missing.append(f"{cls.__name__}._forward_impl")
    if missing:
        raise UnsupportedError(
            f"megatron-core {installed_version()} has no {', '.join(missing)}, which the FP8 "
            f"linears replace; use megatron-core {' or '.join(SUPPORTED_VERSIONS)}."
        )


def has_transformer_engine() -> bool:
    """Tell whether megatron-core found TransformerEngine, so that its TE classes exist."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def rms_norms() -> tuple[type, ...]:
    """Return the classes of RMS norms that Megatron's layers are built with."""
    import torch

    if not has_transformer_engine():
        return (torch.nn.RMSNorm,)
    import transformer_engine.pytorch

    return (torch.nn.RMSNorm, transformer_engine.pytorch.RMSNorm)


def mtp_transformer_layer(module: Any) -> Any:
    """Return the transformer layer of a MultiTokenPredictionLayer; it was renamed after 0.16."""
    found = getattr(module, "transformer_layer", None)
    return found if found is not None else module.mtp_model_layer


@contextmanager
def without_query_norm() -> Iterator[None]:
    """A region in which models without ``q_lora_rank`` are built as Hugging Face has them.

    With ``qk_layernorm`` Megatron-LM 0.20 puts a norm in front of ``linear_q_proj`` of such models,
    Moonlight among them, which no Hugging Face model has (Megatron-Bridge issue 5261). Other
    versions do not, and nothing is changed for them.
    """
    patch = query_norm_patch()
    if patch is None:
        yield
        return
    owner, name, chosen = patch
    stock = getattr(owner, name)
    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def query_norm_patch() -> tuple[Any, str, Any] | None:
    """Return owner, name and value of what :func:`without_query_norm` changes, if anything."""
    try:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    except ImportError:
        return None
    name = "_mla_fused_linear_or_default"
    stock = getattr(QKNormConfigResolver, name, None)
    if stock is None:  # mended, or built in another way: a model with the norm is refused
        return None

    def chosen(self: Any, module_spec: Any, module_name: str) -> Any:
        if module_name == "linear_q_proj":
            return module_spec or self.linear_impl
        return stock(self, module_spec, module_name)

    return QKNormConfigResolver, name, chosen


GATED_DELTA_NETS = ("gated_delta_net", "gdn")
"""Names of the attention variant; the second from the commit of NeMo RL on."""


def register_with_bridge(fp8_classes: Iterable[type]) -> None:
    """Register the FP8 classes with Megatron-Bridge.

    ``AutoMapping`` (models/conversion/param_mapping.py) knows linear classes by name, as "column"
    or "row" parallel or "replicated".
    """
    try:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot be imported ({error}); install it, or use "
            "megatron_fp8rl.convert and megatron_fp8rl.export."
        ) from None
    for cls in fp8_classes:
        kinds = {"ColumnParallel": "column", "RowParallel": "row"}
        kind = next((kinds[part] for part in kinds if part in cls.__name__), "replicated")
        AutoMapping.register_module_type(cls.__name__, kind)


def check_neutral(name: str, options: dict[str, Any]) -> None:
    """Refuse arguments of a newer ``_forward_impl`` that request something unknown."""
    for key, value in options.items():
        if value != _NEUTRAL.get(key):
            option = _OPTIONS.get(key, key)
            raise UnsupportedError(
                f"'{name}' was called with '{key}', which FP8 linears do not serve; switch "
                f"'{option}' off or pin the module to BF16."
            )
