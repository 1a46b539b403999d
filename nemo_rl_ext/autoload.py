"""What torch runs at the end of ``import torch``, through the entry-point group ``torch.backends``.

This is the one door that opens by itself in the driver and in every worker of NeMo RL. It must
cost nothing elsewhere: it puts one finder on ``sys.meta_path`` and looks at nothing.
"""

from __future__ import annotations

import contextlib
import os

SWITCH = "FP8RL_AUTOLOAD"
"""Environment variable; ``0`` switches the entry point off, the launcher still works."""


def start() -> None:
    """Install the hooks of :mod:`nemo_rl_ext.activation`; never raises."""
    if os.environ.get(SWITCH) == "0":
        return
    try:
        from nemo_rl_ext.activation import install

        install()
    except Exception:
        # Torch makes an error of ours its own, and `import torch` would fail everywhere.
        with contextlib.suppress(Exception):
            import logging

            logging.getLogger(__name__).exception(
                "fp8rl could not hook into NeMo RL; its config keys are not served here."
            )
