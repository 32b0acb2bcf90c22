"""The shipped configuration files, and the schema of a configuration.

sections        the sections about prompts, rollouts, placement and storage
scoring         the sections about rewards and guardrails
training        the sections about advantages and the update
validation      the base of every section and request; plain values -> one of them, or every error at once
schema          the complete configuration of a run, of a replay, and of a file of rewards; what identifies a run
contradictions  combinations of settings that are refused
unknown_keys    TRL's names of keys, and suggestions for unknown keys
yaml_files      a YAML file -> plain values
loader          a YAML file and overrides -> a checked configuration
"""
