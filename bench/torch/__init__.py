"""Measures the backend of torch.distributed beside Gloo, and what PyTorch's strategies send."""
