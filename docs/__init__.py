"""The documents; `docs.generate` writes what is generated in them."""
