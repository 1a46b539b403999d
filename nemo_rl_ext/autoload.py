"""What torch runs at the end of ``import torch``, through the entry-point group ``torch.backends``.

NeMo RL has no entry point for plugins, and this one runs in its driver before the config is read.
It must cost nothing elsewhere: it puts one finder on ``sys.meta_path`` and looks at nothing.
"""

from __future__ import annotations

import contextlib
import os

SWITCH = "FP8RL_AUTOLOAD"
"""Environment variable that switches the entry point off; the launcher still works."""

_OFF = ("0", "false", "off", "no")
_ON = ("", "1", "true", "on", "yes")


def start() -> None:
    """Install :mod:`nemo_rl_ext.patch_finder`; never raises.

    A value of :data:`SWITCH` that is neither on nor off is logged and counts as on: without the
    finder a config's keys would be ignored, with it nothing happens that no key asks for.
    """
    value = os.environ.get(SWITCH, "")
    word = value.strip().lower()
    if word in _OFF:
        return
    if word not in _ON:
        _log("%s is '%s', which is neither on nor off; fp8rl stays on. Set it to 0.", SWITCH, value)
    try:
        from nemo_rl_ext.patch_finder import install

        install()
    except Exception:
        _log("fp8rl could not hook into NeMo RL; its config keys are not served here.", trace=True)


def _log(message: str, *values: str, trace: bool = False) -> None:
    # Torch makes an error of ours its own, and `import torch` would fail everywhere.
    with contextlib.suppress(Exception):
        import logging  # here: most processes have nothing to say

        logging.getLogger(__name__).warning(message, *values, exc_info=trace)
