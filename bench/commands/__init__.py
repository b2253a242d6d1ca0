"""What the commands of the benchmarks share: groups of options, jobs that they start, their ranks.

A new command takes its options from `options`, and starts ranks with `jobs`.
"""
