"""Check of the KV connectors of an engine that is refitted.

A connector keeps keys and values outside of the engine and returns them when a prompt comes again.
After a refit, or new KV scales, they belong to older weights or scales and must be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8rl.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def check_connector(config: KVTransferConfig | None) -> None:
    """Raise UnsupportedError for a connector that does not drop its cache when it is reset.

    vLLM calls ``reset_cache``, whose base does nothing and returns None, and takes that for
    success.

    Args:
        config: ``kv_transfer_config`` of the engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for one in _each(config):
        connector = KVConnectorFactory.get_connector_class(one)
        if connector.reset_cache is KVConnectorBase_V1.reset_cache:
            raise UnsupportedError(
                f"The KV connector '{one.kv_connector}' has no reset_cache of its own, so it would "
                "serve keys and values of older weights after a refit; start the engine without "
                "it, or with one that has, such as 'OffloadingConnector'."
            )


def _each(config: KVTransferConfig | None) -> Iterator[KVTransferConfig]:
    """Yield the connector, or those that a MultiConnector is made of."""
    from vllm.config import KVTransferConfig

    if config is None or config.kv_connector is None:
        return
    parts = (config.kv_connector_extra_config or {}).get("connectors")
    if config.kv_connector != "MultiConnector" or not parts:
        yield config
        return
    for part in parts:
        yield from _each(KVTransferConfig(**part))
