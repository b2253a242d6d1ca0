"""Measure one call: a collective, messages of two ranks, checked mode, a combination of arrays.

``ring bench all_reduce -g 2 --native`` and ``ring bench pingpong -g 2`` are the commands
that users run most.
"""
