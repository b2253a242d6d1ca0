"""What was measured of calls: printed as nccl-tests or OSU do, written, compared and drawn.

``ring bench compare BEFORE AFTER`` says what changed by more than the noise, and ``python -m
bench plot FILE`` draws bandwidth and latency.
"""
