"""Benchmarks and the demo: ``ring bench`` lists the commands.

A room for each thing that is measured: `calls` and their `results`, `speed`, `overlap`, `training`,
`experts`, `torch`; below them who is timed (`contenders`), what (`workloads`), and how (`timing`).
"""
