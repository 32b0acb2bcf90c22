"""The flows of the program `grpo`. They read as the algorithm; no tensors here.

training       the loop; start reading at training/train.py
evaluation, replaying, rescoring, sample, export   `grpo evaluate`, `replay`, `rescore`, `sample`, `export`
verification   `grpo verify`, `grpo evaluate EXPORT --card`: what is stored or exported is computed again and compared
inspect_run, watch_run, list_runs, compare_runs   `grpo inspect`, with `--watch`, `grpo list`, `grpo compare`
rewards/                     `grpo rewards`: weights, analysis of stored scores, a server that scores for others
init, pruning, deploy, worker   `grpo init`, `prune`, `deploy`, `worker`
pipeline       what all flows share: an open run, how a stage is called, the forms of Prefect's UI
requests       what the commands are asked for: their options, and the fields of the forms
preflight      checks before any model loads, `grpo doctor`
tracking       metrics and images in TensorBoard, W&B, MLflow, trackio and SwanLab
server         Prefect's server: `grpo ui`, a temporary one, checks of both; settings before its import
command_line   the program `grpo`: its commands and options; those that run a flow are also functions for scripts
run_flow       runs a flow to its end, from a terminal, a script or a notebook
http_server    the HTTP servers of this program: on which address, for whom
terminal       progress bars, tables and summaries that the commands print
"""

import importlib
import logging
from typing import TYPE_CHECKING

from flows.server.prefect_settings import apply_settings

if TYPE_CHECKING:
    from flows.command_line.flow_commands import evaluate, replay, rescore, train
    from flows.command_line.verification_commands import repeat_evaluation, verify
    from flows.training.hooks import StopTraining
    from tasks.runs.frames import open_run

__all__ = ["StopTraining", "evaluate", "open_run", "repeat_evaluation", "replay", "rescore", "train", "verify"]

# With bitsandbytes installed, transformers imports it, and on the CPU it logs messages about unused 4-bit kernels.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in str(record.msg))
# One such line for each stage would hide the run's own lines in the log of Prefect's UI; failures are logged as errors.
logging.getLogger("prefect.task_runs").addFilter(
    lambda record: record.levelno > logging.INFO or not str(record.msg).startswith("Finished in state")
)
# Prefect reads its settings when it is imported, and everything here imports it after this.
apply_settings()

_MODULES = {
    "StopTraining": "flows.training.hooks",
    "open_run": "tasks.runs.frames",
    **dict.fromkeys(("repeat_evaluation", "verify"), "flows.command_line.verification_commands"),
}


def __getattr__(name: str) -> object:
    """Import a function when it is first used: the program `grpo` imports this package and starts at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "flows.command_line.flow_commands")), name)
