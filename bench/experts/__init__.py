"""Measure mixtures of experts: how fast tokens are dispatched, and how even the loads become.

``ring bench moe`` times dispatch and combine, and ``ring bench balance`` trains with
every scheme of balancing.
"""
