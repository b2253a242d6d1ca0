"""Mixture-of-experts modules on top of `collectives` and `parallel`.

A gate (`moe.gates`) chooses experts for each token, `moe.routing` has its choices as a table, and
`moe.dispatch` sends the tokens to the ranks of their experts and back.  `moe.reference` computes
the same on one rank by products with masks.
"""
