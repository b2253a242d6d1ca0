"""The demo: it shows the speed of the library, and accounts for every byte.

``make demo`` or ``ring bench demo`` runs it in at most three minutes.
"""
