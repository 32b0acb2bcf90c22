"""The shipped configuration files, and what one may say.

schema          every section and field; reward_sections those of rewards; section is what all of them are
checks          combinations that cannot be; dataset_checks those of prompt files, reward_checks those of rewards
rewards_file    a file of rewards by themselves
loader          a YAML file and overrides -> a checked configuration
determining     what of a configuration determines a run, and what differs between two
core_settings   its sections -> the records that grpo_core reads
replay          the configuration of a replay
"""
