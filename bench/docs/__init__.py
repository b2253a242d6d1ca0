"""The generated documents: pages of algorithms, the API reference, tables of measurements."""
