"""Parquet tables and their schemas."""
