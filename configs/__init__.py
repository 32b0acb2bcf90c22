"""The shipped configuration files, and the schema of a configuration.

sections        the sections about the run and the policy
prompts         the sections about prompts: files, curriculum, those held out
rollouts        the sections about sampling, by policy.kind
placement       the sections about where stages run and where runs are kept
scoring         the sections about rewards, guardrails and advantages
training        the sections about the update
validation      the base of every section and request; plain values -> one of them, or every error at once
schema          the complete configuration of a run, of a replay, and of a file of rewards
identity        what identifies a run, and how two runs differ
contradictions  combinations of sections that are refused; stream_contradictions those between streams
policy_name     how people name a policy version: RUN, RUN@N or RUN@best
yaml_files      a YAML file -> plain values; suggestions for unknown keys
trl_names       TRL's names of options: those that are accepted, and why others have no setting here
loader          a YAML file and overrides -> a checked configuration
"""
