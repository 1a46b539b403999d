"""`WorkerBlock`: a recipe on its way to a worker that would train in BF16 if it did not know it."""

from __future__ import annotations

import sys
from typing import Any


class WorkerBlock(dict[str, Any]):
    """The keys of a recipe in ``policy.megatron_cfg.fp8rl``, as the driver hands them to Ray.

    Upstream's loss of SFT and DPO says nothing of us, so the config itself has to: it travels by
    reference to this module. A worker without this package fails with a ModuleNotFoundError that
    names it, and one whose model is not going to be converted with an UnsupportedError.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self),)


def _arrived(block: dict[str, Any]) -> WorkerBlock:
    from nemo_rl_ext.patches.ledger import installed

    if "torch" in sys.modules and installed() is None:
        from fp8rl.errors import UnsupportedError

        raise UnsupportedError(
            "'policy.megatron_cfg.fp8rl' asks for FP8 training, but torch's autoload is off in "
            "this worker; leave TORCH_DEVICE_BACKEND_AUTOLOAD and FP8RL_AUTOLOAD unset there."
        )
    return WorkerBlock(block)
