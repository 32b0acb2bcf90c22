"""Benchmarks: run by `make bench`, never by the tests."""

import flows  # noqa: F401  (its settings must stand before Prefect is imported)
