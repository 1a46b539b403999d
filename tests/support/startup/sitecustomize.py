"""Python imports this first in each process of the tests: ``tests/conftest.py`` sets their path.

An engine's imports make a million objects that stay. Garbage collection looks through them again
and again meanwhile, which is a third of the CPU time of a start, and dozens of processes start.
"""

import gc

gc.set_threshold(100_000, 20, 100)
