"""Measure what communication hides behind computation: of an all-reduce, and in DualPipe.

``ring bench overlap`` starts an all-reduce and does other work meanwhile; ``ring bench
dualpipe`` trains with micro-batches that overlap.
"""
