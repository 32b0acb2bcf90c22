"""Terminal output of the commands.

progress     how far each stage is: bars in a terminal, lines elsewhere
tables       helpers that all tables share
summaries    the end of train, replay, evaluate, prune and deploy; the findings of doctor
rewards      rewards, their analysis, and what a rescoring changed
inspection   a run with its curves and samples; comparison shows several
"""
