"""The doctor against NeMo RL's own loader and config class: test_nemo_rl.py runs this file."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("nemo_rl.algorithms.grpo", exc_type=ImportError)

import nemo_rl_yamls
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.utils import config as nemo_config
from omegaconf import OmegaConf

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError
from fp8rl.plugins.adapters import ConfigRequest
from nemo_rl_ext.doctor.config_file import load_config
from nemo_rl_ext.doctor.examination import examine
from nemo_rl_ext.patch_finder import install
from support.sources import source

install().take_up()
BLOCK = {"kv_cache": {"dtype": "auto"}}


def test_configs_are_read_and_refused_as_by_the_driver() -> None:
    nemo_config.register_omegaconf_resolvers()
    root = source("NEMO_RL_SRC")
    outcomes = set()
    for file in nemo_rl_yamls.fp8_configs(root):
        value: Any = OmegaConf.to_container(nemo_config.load_config(str(file)), resolve=True)
        assert load_config(file) == value, file
        for section in (
            value["policy"]["megatron_cfg"],
            value["policy"]["generation"]["vllm_cfg"],
            value["loss_fn"],
        ):
            section["fp8rl"] = copy.deepcopy(BLOCK)
        refusal = ()
        try:
            MasterConfig(**value)
        except Fp8RLError as error:
            refusal = (str(error),)
        found = examine(ConfigRequest(file, root, recipe=Recipe.from_dict(BLOCK)))
        assert found.problems == refusal, file
        outcomes.add(refusal)
    assert len(outcomes) > 1
