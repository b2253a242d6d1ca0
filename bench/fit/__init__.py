"""Measures what messages, copies and calls cost on this machine, and checks predictions from it."""
