"""Scores of any function written for TRL's trainers.

- ``reward``: the reward; ``loading`` imports the function, ``trl_call`` calls it and reads its answer.
"""
