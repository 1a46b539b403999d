"""What nemo_rl_ext offers through fp8rl's plugin contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl import hookimpl

if TYPE_CHECKING:
    from nemo_rl_ext.grpo.importance_sampling import Corrector


@hookimpl
def register_is_correctors() -> dict[str, Corrector]:
    """The built-in corrector, ``is``."""
    from nemo_rl_ext.grpo.importance_sampling import correct_is

    return {"is": correct_is}
