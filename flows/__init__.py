"""The training flow and the command line. Reads as the algorithm; no tensors here.

prefect_settings   settings of Prefect that must stand before it is imported
inputs             what a configuration points at, read and checked
preparation        a configuration -> a run, its folder opened
train              the training flow
replay             training from what another run stored; replay_request and replay_source are its inputs
summary            what a finished run tells
doctor             checks a configuration, each finding with its mend
inspection         what `grpo inspect` shows of a run; inspection_terminal draws it, tasks.reports.page writes it
run_figures        names of the figures that every command's `--json` shares
terminal           bars on the way, summaries and findings
command_line       the program `grpo`
tiny_model         makes the shipped tiny GLM-Image again; tiny_text_model the tiny text model
"""

import logging

from flows.prefect_settings import apply_settings

# Where bitsandbytes is installed, transformers imports it, and on the CPU it tells of 4-bit kernels nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in str(record.msg))
# Prefect reads its settings when it is imported, and everything that imports it here comes after this.
apply_settings()
