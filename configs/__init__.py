"""The shipped configuration files, and what one may say.

schema          every section and field
checks          combinations that cannot be; dataset_checks those of prompt files
loader          a YAML file and overrides -> a checked configuration
core_settings   its sections -> the records that grpo_core reads
replay          the configuration of a replay
"""
