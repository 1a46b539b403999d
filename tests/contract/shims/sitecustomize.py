"""NeMo RL is for Python 3.12 and later; with these names its sources import on 3.11 as well.

And where CUDA is emulated, the process that vLLM starts for its model gets what Ray's get.
"""

import os
import sys
import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

if "CPU_FOR_CUDA_FOLDER" in os.environ and "--multiprocessing-fork" in sys.orig_argv:
    import cpu_for_cuda

    cpu_for_cuda.setup()
