"""fp8rl's patches of NeMo RL, one module each; all act in the driver's processes.

:data:`nemo_rl_ext.patch_finder.PATCHES` says which patch belongs to which upstream module. Every
module says why the patch exists, how it works, which upstream files it was written for and until
when it is needed. ``UPSTREAM`` lists what the patch relies on, which is compared with the installed
NeMo RL before anything is replaced; ``tests/contract`` compares it with the real sources.
``apply(module, finder)`` puts the patch into an imported module. A run without ``fp8rl`` keys is
not changed.
"""
