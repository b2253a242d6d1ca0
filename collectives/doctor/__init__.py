"""The doctor: whether the library would work in this environment or job, and what would be slow."""

from collectives.doctor.findings import Finding, Level

__all__ = ["Finding", "Level"]
