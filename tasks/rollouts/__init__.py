"""Stage 1.

plan               prompts, sample ids and seeds of a sampling round or an evaluation
collect_rollouts   the stage: a policy and a plan -> stored rollouts; images for baselines
rows               groups of rollouts -> the columns that are stored
sources            stores the images in the prompts of a plan
streams            tokens and denoising steps in stored rollouts: columns, rows for training, metrics
"""
