"""Write a model as a block-FP8 checkpoint for stock vLLM and transformers.

It is in the format that SGLang documents too (not run).

The folder has E4M3 weights with ``weight_scale_inv`` in float32 for each block of 128x128 (the
format of DeepSeek-V3's checkpoints), KV scales, and a ``quantization_config``. Codes and scales are
those that an engine with fp8rl makes of the same weights by the same recipe.
"""

from fp8rl.export.format import Export, left_alone
from fp8rl.export.plan import check_device, plan_export
from fp8rl.export.scales import wire_scale_name
from fp8rl.export.write import write_export

__all__ = ["Export", "check_device", "left_alone", "plan_export", "wire_scale_name", "write_export"]
