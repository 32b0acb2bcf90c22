"""Stored stages against the same stages computed again.

records    what a verification found: levels, differences, a stage, the whole report
card       the report as tables, for the command and the model card
checks     what reading alone shows: checksums, and whether tables belong together
scratch    a run's store that is not written, and copies of what a stage reads
compare    the differences of two artifacts, and their level
tables     of their tables: rows, columns, pixels
tensors    of states, weights and optimizers
values     how values of one column or tensor are compared, counted and shown
evaluation_card   how an exported policy was evaluated, with all that repeating it needs
measured_evaluation   a stored evaluation as such a card has it
repeated   such an evaluation repeated: equal, within rounding or the interval, or not
"""
