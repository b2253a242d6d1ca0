"""Measure the backend "ring" of torch.distributed beside PyTorch's own, and what it sends.

``ring bench torch`` times calls and training steps; ``ring bench torch_traffic`` compares
messages with formulas.
"""
