"""Stage 3.

compute_advantages   the stage: scores of siblings -> a reward and an advantage per sample and stream, with metrics
compared_samples     the scores of an iteration's samples, arranged by what is compared
"""
