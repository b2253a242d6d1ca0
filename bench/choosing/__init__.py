"""Choose algorithms by measurement: `tune` measures costs and algorithms, and one file holds both.

`ring bench tune` writes decisions.json, which `Communicator.load_decisions` reads.
docs/choosing.md says when rules, measured tables or predictions choose.
"""
