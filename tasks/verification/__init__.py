"""Stored stages against the same stages computed again.

records    what a verification found: levels, differences, a stage, the whole report
"""
