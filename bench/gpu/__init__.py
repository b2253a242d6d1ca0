"""Run everything that needs a GPU: ``make gpu``, or ``python -m bench.gpu``.

`mps` runs a command with a daemon of NVIDIA's Multi-Process Service of its own.
"""
