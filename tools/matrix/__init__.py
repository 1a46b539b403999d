"""Build an environment for each version of an engine, run the engine tests there, write a page.

    make matrix ARGS="--list"
    make matrix ARGS="vllm-0.25.1 megatron-*"

Standard library only. `rows` says what is run, `environments` builds, `check` runs inside a row's
environment, `results` tells outcomes apart and writes `docs/versions.md`.
"""
