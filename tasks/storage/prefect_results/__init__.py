"""Prefect's result records as JSON references in the run folder."""
