"""The training flow and the command line. Reads as the algorithm; no tensors here.

prefect_settings   settings of Prefect that must stand before it is imported
inputs             what a configuration points at, read and checked
preparation        a configuration -> a run, its folder opened
stages             how flows call their stages: named, recorded, rewards side by side
temporary_server   the server that Prefect starts for a single run ends with it, killed or not
train              the training flow; history is what it has seen so far
sampling, drawing  its first three stages: how they are called, and in turn with the updates or ahead of them
evaluate           held-out scores of one version; evaluate_request is what it is asked for
stored_policies    the versions of a run that there are
watch              guardrails beside the held-out reward, and what is done when they part
stored_iterations  what a run has stored that can be scored again or learned from
replay             training from what another run stored; replay_request is what it is asked for
rescore            stored rollouts scored again; rescore_request is what it is asked for
reward_analysis    what a run's stored scores are worth
reward_server      gives the project's rewards to others over HTTP
summary            what a finished run tells
stage_flows, worker   stages as flows, and the worker of a pool that does them
deploying/         `grpo deploy`; parameters and rescore_form are the forms of what it registers
pruning/           `grpo prune`; scheduled is what the server is still going to run
server/            `grpo ui`, and what other commands ask of a server
doctor             checks a configuration, each finding with its hint
inspection         what `grpo inspect` shows of a run; terminal shows it, tasks.reports.run_page writes it
run_figures        names of the figures that every command's `--json` shares
terminal           bars on the way, summaries and findings
rescoring_terminal, rewards_terminal, reward_tables   rescorings and rewards in the terminal
command_line       the program `grpo`; reward_commands is `grpo rewards`, told what all commands share
tiny_model         makes the shipped tiny GLM-Image again; tiny_text_model the tiny text model
"""

import logging

from flows.prefect_settings import apply_settings

# Where bitsandbytes is installed, transformers imports it, and on the CPU it tells of 4-bit kernels nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit" not in str(record.msg))
# Prefect reads its settings when it is imported, and everything that imports it here comes after this.
apply_settings()
