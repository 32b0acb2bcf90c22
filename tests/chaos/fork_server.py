"""A process that has imported what `grpo` needs and forks one for every line that it reads.

Importing torch, Prefect and the models' libraries takes longer than the small runs that are killed here. What is forked
is the command line itself, in a session of its own, so that it and its children can be killed at once.

`python -m tests.chaos.fork_server` says `{"threads": N}` once it is ready, then reads `{"arguments": [...], "output":
FILE, ...}`, the request of `grpo`; it answers `{"pid": N}`, and `{"pid": N, "code": C}` when that
process has ended.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

# A run imports these when it first needs them; one that is missing here costs each forked process its import.
_IMPORTED = (
    "configs.loader",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "fastapi",
    "flows.preflight.inputs",
    "flows.terminal.output",
    "flows.training.train",
    "graphviz",
    "grpo_core.policies.causal_lm.family",
    "grpo_core.policies.causal_lm.policy",
    "grpo_core.policies.diffusers.family",
    "grpo_core.policies.diffusers.policy",
    "grpo_core.policies.glm_image.family",
    "grpo_core.policies.glm_image.policy",
    "pandas",
    "peft.tuners.lora.bnb",
    "prefect.concurrency.services",
    "prefect.flow_engine",
    "prefect.task_engine",
    "pyarrow.dataset",
    "pyarrow.pandas_compat",
    "tasks.update.component",
    "tests.chaos.operations",
    "transformers.models.glm_image.image_processing_glm_image",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    """Fork on demand until the input ends."""
    from flows.server.prefect_settings import apply_settings

    apply_settings()
    for module in _IMPORTED:
        importlib.import_module(module)
    # The collector of a forked process would touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    _say({"threads": threading.active_count()})
    living: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([0, *living], [], [])
        for descriptor in ready:
            if descriptor == 0:
                line = _line()
                if not line:
                    _end(living)
                pid = _fork(json.loads(line), living)
                living[os.pidfd_open(pid)] = pid
                _say({"pid": pid})
            else:
                pid = living.pop(descriptor)
                os.close(descriptor)
                _say({"pid": pid, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def grpo(request: dict[str, Any], arguments: list[str]) -> NoReturn:
    """Run the command line in this process, counting its operations; it ends with its exit code.

    Args:
        request: `root`, `fatal` (name and number of an operation, or null) and `census`, the file that receives the
            number of operations by name at the end.
        arguments: those of the command line.
    """
    from flows.command_line.main import main
    from tests.chaos.operations import Operation, count_operations

    fatal = Operation(*request["fatal"]) if request["fatal"] else None
    counts = count_operations(request["root"], fatal)
    sys.argv = ["grpo", *arguments]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        # A forked process must not go on as the one that forks.
        traceback.print_exc()
    Path(request["census"]).write_text(json.dumps(counts))
    # What a process does when it ends, but for the taking apart of all modules, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(living: dict[int, int]) -> NoReturn:
    """End all forked processes and this one; the taking apart of all modules takes seconds."""
    for pid in living.values():
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _line() -> bytes:
    """One line, unbuffered: what a forked process inherited of a buffer it would read again."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _fork(request: dict[str, Any], living: dict[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for descriptor in living:
        os.close(descriptor)
    nothing, output = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    )
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    grpo(request, request["arguments"])


if __name__ == "__main__":
    main()
