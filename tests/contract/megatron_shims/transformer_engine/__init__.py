"""Stands for TransformerEngine 2.12 on a CPU: what a dense model of Megatron's TE spec is made of.

Classes, attributes and signatures are its own, the arithmetic is torch's. Any other name of it is
an empty class, or is missing where Megatron-LM then has a way of its own.
"""

from any_package import has_any_module

__version__ = "2.12.0"
has_any_module(
    __name__,
    missing=(
        "optimizers",  # torch's AdamW, and local functions for norms of gradients
        "cross_entropy",
        "cpu_offload",
        "cpu_offload_v1",
        "cpp_extensions",
    ),
)

from transformer_engine import common, pytorch  # noqa: E402

__all__ = ["common", "pytorch"]
