"""For tools that still ask for it; everything is said in pyproject.toml."""

from setuptools import setup

setup()
