"""Stage 2.

score_rewards   the stage: stored images or texts -> the scores of one reward; stored scores are kept
score_rows      scores rows, here or in child processes; imports little, because these start with it
scores          stored scores as one frame, and the same samples scored a second time
"""
