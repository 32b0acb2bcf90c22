"""The training flow and the command line. Reads as the algorithm; no tensors here.

    prefect_settings   settings of Prefect that must stand before it is imported
    preparation        a configuration -> a run: its inputs read and checked, its folder opened
    train              the training flow
    summary            what a finished run tells
    doctor             checks a configuration, each finding with its mend
    inspection         curves, best and worst pictures of a run, in the terminal or as one HTML file
    command_line       the program `grpo`
"""
