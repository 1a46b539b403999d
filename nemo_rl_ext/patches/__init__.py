"""The places where fp8rl reaches into NeMo RL, one module each.

Every module says why it is there, how it works, for which upstream file it was written and when it
can go. ``UPSTREAM`` lists what it relies on; :func:`nemo_rl_ext.patches.upstream.resolve` compares
before anything is wrapped, and ``tests/contract`` does so with the real sources.
``apply(module, seams)`` puts the seam in. Nothing here changes a run without ``fp8rl`` keys.
"""
