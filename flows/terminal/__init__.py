"""Terminal output of the commands.

output       reports as tables
progress     how far each stage is: bars in a terminal, lines elsewhere
inspection   curves and samples of runs
"""
