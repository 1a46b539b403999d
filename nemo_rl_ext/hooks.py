"""What nemo_rl_ext offers through fp8rl's plugin contract."""

from __future__ import annotations

from fp8rl import hookimpl
from nemo_rl_ext.importance_sampling import Corrector, correct


@hookimpl
def register_is_correctors() -> dict[str, Corrector]:
    """The built-in corrector, ``is``."""
    return {"is": correct}
