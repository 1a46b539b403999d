"""`RunState`: what the patches of one process know about the run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8rl import PluginManager
    from nemo_rl_ext.config.plan import RunPlan
    from nemo_rl_ext.driver.batch_correction import BatchCorrection


class RunState:
    """The run as one process sees it; imported with torch, so it must be quick to import."""

    plan: RunPlan | None = None
    """Of the config, in the driver; of the loss, where that was sent to another process."""
    correction: BatchCorrection | None = None
    """Corrects whole batches; made together with the loss."""
    unread_config: Any = None
    """The config that was loaded, until a class that knows our keys has been made of one."""

    @cached_property
    def plugins(self) -> PluginManager:
        """The installed plugins, for the hooks that a run calls."""
        from fp8rl import PluginManager

        return PluginManager()
