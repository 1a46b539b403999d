"""What FP8 linears rely on in TransformerEngine's modules, against the sources of its releases.

``TRANSFORMER_ENGINE_SRC`` names folders with an unpacked wheel of ``transformer-engine`` each (it
holds the Python sources), separated as in ``PATH``. Nothing of it is imported.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

SOURCES = [Path(p) for p in os.environ.get("TRANSFORMER_ENGINE_SRC", "").split(os.pathsep) if p]
if not SOURCES:
    pytest.skip("TRANSFORMER_ENGINE_SRC names no sources", allow_module_level=True)

READ = {
    "Linear": "use_bias apply_bias parallel_mode tp_size tp_group sequence_parallel "
    "fuse_wgrad_accumulation wgrad_store ub_overlap_ag_fprop ub_overlap_rs_fprop "
    "ub_overlap_ag_dgrad ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad symmetric_ar_type",
    "LayerNormLinear": "use_bias apply_bias parallel_mode tp_size tp_group sequence_parallel "
    "fuse_wgrad_accumulation wgrad_store ub_overlap_ag_fprop ub_overlap_rs_fprop "
    "ub_overlap_ag_dgrad ub_bulk_dgrad ub_bulk_wgrad symmetric_ar_type "
    "layer_norm_weight eps normalization zero_centered_gamma return_layernorm_output",
    "GroupedLinear": "use_bias apply_bias num_gemms fuse_wgrad_accumulation wgrad_store",
}
"""Attributes that ``megatron_fp8rl.layers.te_classes`` reads, those whose values it refuses too."""
KNOWN = {
    "Linear": set(),
    "LayerNormLinear": set(),
    # Refused unless False; None leaves the layout of parameters as it was.
    "GroupedLinear": {
        ("single_grouped_weight", "False"),
        ("single_grouped_bias", "False"),
        ("use_grouped_tensor", "None"),
    },
}
"""Options of the constructors that came after 2.12, with the values that were looked at."""
OF_2_12 = {
    "Linear": "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group "
    "tp_size get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
    "parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
    "ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
    "save_original_input name",
    "LayerNormLinear": "in_features out_features eps sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker init_method bias normalization return_bias "
    "params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered "
    "parameters_split zero_centered_gamma device ub_bulk_wgrad ub_bulk_dgrad ub_overlap_ag "
    "ub_overlap_rs ub_overlap_rs_dgrad ub_name delay_wgrad_compute symmetric_ar_type name",
    "GroupedLinear": "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker rng_tracker_name init_method bias return_bias "
    "params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute "
    "save_original_input name",
}
FILES = {
    "Linear": "linear.py",
    "LayerNormLinear": "layernorm_linear.py",
    "GroupedLinear": "grouped_linear.py",
}


def class_in(file: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def attributes_set(node: ast.ClassDef) -> set[str]:
    """Attributes that a class assigns, and parameters that it registers by name."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.attr)
        if isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "register_parameter":
            name = each.args[0]
            if isinstance(name, ast.Constant):
                found.add(name.value)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", FILES)
def test_modules_have_what_is_read_and_no_option_that_is_unknown(source: Path, name: str) -> None:
    folder = source / "transformer_engine" / "pytorch" / "module"
    module = class_in(folder / FILES[name], name)
    base = class_in(folder / "base.py", "TransformerEngineBaseModule")
    missing = set(READ[name].split()) - attributes_set(module) - attributes_set(base)
    assert not missing
    (init,) = (n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    names = [argument.arg for argument in init.args.args][1:]
    defaults = [ast.unparse(value) for value in init.args.defaults]
    given = dict(zip(names[-len(defaults) :], defaults, strict=True))
    new = {(name, given.get(name)) for name in set(names) - set(OF_2_12[name].split())}
    assert new <= KNOWN[name]
