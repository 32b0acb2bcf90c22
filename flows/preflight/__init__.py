"""Checks that run before any model loads: `grpo doctor` and the inputs of a flow."""
