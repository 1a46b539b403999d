"""NeMo RL is for Python 3.12 and later; with these names its sources import on 3.11 as well."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
