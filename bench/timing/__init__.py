"""How calls are timed: in turns and random order, by medians and quartiles of samples.

All benchmarks take their times with this folder, so that the same words mean the same everywhere.
"""
