"""Compare training strategies: what they send, what they keep, and how long a step takes.

``ring bench strategies`` runs all of them, and compares their losses with those of one rank.
"""
