"""Mixture-of-experts modules on top of `collectives` and `parallel`.

The package is empty so far.  It is reserved for gating, the dispatch of tokens to experts on other
ranks, and the layer that contains them.
"""
