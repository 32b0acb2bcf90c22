"""Stage 2.

score_rewards   the stage: stored images or texts -> the scores of one reward; stored scores are kept
rows            scores rows; imports little, because scoring processes start with it
process_pool    child processes that keep a reward's model
"""
