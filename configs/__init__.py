"""The shipped configuration files, and the schema of a configuration.

sections        the sections about prompts, rollouts, placement and storage
training        the sections about rewards, guardrails, advantages and the update
validation      the base of every section and request; plain values -> one of them, or every error at once
schema          the complete configuration of a run, of a replay, and of a file of rewards; what identifies a run
contradictions  combinations of settings that are refused; stream_contradictions those between streams
policy_name     how people name a policy version: RUN, RUN@N or RUN@best
yaml_files      a YAML file -> plain values; suggestions for unknown keys
trl_names       TRL's names of options: those that are accepted, and why others have no setting here
loader          a YAML file and overrides -> a checked configuration
"""
