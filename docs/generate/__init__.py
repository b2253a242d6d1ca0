"""What writes the generated documents: `python -m docs.generate`, from the root of a checkout."""
