"""Benchmarks, the demo, and the generated documentation.  Not installed."""
