"""Block-FP8 and live KV scales for vLLM."""


def register() -> None:
    pass
