"""Group-relative advantages: each sample is compared with its siblings, not with the batch.

settings    every option, and which settings fit which mix of rewards
compared    which samples of a prompt are compared to train each stream, and the number that they are compared by
previews    which seeds cheap previews choose, and how well their ranks agree with those of the full images
compute     rewards of siblings -> one advantage per sample; the KL to the reference; the numbers of a reward curve
"""
