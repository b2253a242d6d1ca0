"""Mixture-of-experts modules (gating, the dispatch of tokens to experts on other ranks, the layer
itself) will stand here, on top of `collectives` and `parallel`; there are none yet.
"""
