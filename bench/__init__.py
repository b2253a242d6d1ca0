"""Benchmarks, the demo, and the generator of the documents: ``python -m bench --help``."""
