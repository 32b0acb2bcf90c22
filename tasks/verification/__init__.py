"""Stored stages against the same stages computed again.

records    what a verification found: levels, differences, a stage, the whole report
compare    the differences of two artifacts, and their level
tables     of their tables: rows, columns, pixels
tensors    of states, weights and optimizers
values     how values of one column or tensor are compared, counted and shown
"""
