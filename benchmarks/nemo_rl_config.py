"""The config of NeMo RL's driver, for programs that build one of its workers alone.

``nemo_rl.py --task real --write-only`` writes it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config's file, overrides of its keys, and a file for what is found."""
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)


def read_config(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the config as ``run_grpo.py`` reads it, and the model's tokenizer.

    This folder leaves ``sys.path``: it has a file with the name of NeMo RL's package, and Ray would
    tell its workers too.

    Args:
        options: what :func:`add_arguments` added.
    """
    here = Path(__file__).resolve().parent
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != here]
    from nemo_rl.algorithms.grpo import MasterConfig  # before the keys are read
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.utils.config import (
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    read = load_config(str(options.config))
    if options.set:
        read = parse_hydra_overrides(read, options.set)
    config = MasterConfig(**OmegaConf.to_container(read, resolve=True))
    policy = config.policy
    tokenizer = get_tokenizer(policy["tokenizer"])
    policy["generation"] = configure_generation_config(policy["generation"], tokenizer)
    return config, tokenizer
