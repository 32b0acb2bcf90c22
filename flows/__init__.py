"""The flows of the program `grpo`. They read as the algorithm; no tensors here.

training       the loop; start reading at training/train.py
pipeline       what all flows share: an open run, how a stage is called, requests and forms
evaluation, replay, rescoring   one folder per command: plan (checks the request against a run) and flow
rewards        `grpo rewards`: analysis of stored scores, a server that scores for others
inspection, comparison   `grpo inspect` and `grpo compare`
pruning        `grpo prune`
preflight      checks before any model loads, `grpo doctor`
deployment, server, workers     Prefect: `grpo deploy`, `grpo ui` and `grpo worker`
command_line   the program `grpo`: its commands and options
terminal       progress bars, tables and summaries that the commands print
tiny_models    trains the shipped tiny models again
prefect_settings   Prefect's settings, applied before it is imported
"""

import logging

from flows.prefect_settings import apply_settings

# With bitsandbytes installed, transformers imports it, and on the CPU it logs messages about unused 4-bit kernels.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in str(record.msg))
# Prefect reads its settings when it is imported, and everything here imports it after this.
apply_settings()
