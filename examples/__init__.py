"""Programs that show the use of `parallel` and `moe`, by their public names alone.

Run them from the root of a checkout; they are not installed.
"""
