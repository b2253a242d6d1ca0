"""Measure all goals for the library's speed beside the MPI library that it runs under.

``ring bench speed`` prints the medians and which goals are met; `goals` is the table of them.
"""
