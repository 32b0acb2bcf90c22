"""`grpo rewards`.

analyse   range, agreement and noise of stored scores
server    scores for others over HTTP; answers: a request's file in, its answer out, in child processes
"""
