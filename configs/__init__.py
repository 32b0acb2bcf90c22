"""The shipped configuration files, and what one may contain.

sections     the sections about prompts, rollouts, placement and storage, and what all sections share
scoring      the sections about rewards and the watch for reward hacking
training     the sections about advantages and the update
schema       a configuration as a whole: of a run, of a replay, a file of rewards
checks       combinations of sections that cannot be
keys         TRL's names of keys, and the nearest to an unknown one
loader       a YAML file and overrides -> a checked configuration
identity     which settings determine the results of a run, and what differs between two
"""
