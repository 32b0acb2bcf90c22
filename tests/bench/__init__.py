"""Benchmarks: run by `make bench`, never by the tests."""

import flows  # noqa: F401  (its settings must stand before Prefect is imported)

NEEDS_VLLM = ("engines", "engines_large")
"""Parts that are made only where they are named: they need the environment of `make test-engines`."""
