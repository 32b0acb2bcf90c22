"""Terminal output of the commands, none of which is imported here.

progress     how far each stage is: bars in a terminal, lines elsewhere
tables       reports, and the tables of everything that is printed
inspection   curves and samples of runs
"""
