"""The command line, counting its operations: `python -m tests.chaos.command '{"root": ...}' train CONFIG ...`."""

import atexit
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


def grpo(request: dict[str, Any], arguments: list[str]) -> None:
    """Run the command line in this process, which ends with its exit code.

    Args:
        request: `root`, `fatal` (name and number of an operation, or null) and `census`, the file that receives the
            number of operations by name at the end.
        arguments: those of the command line.
    """
    from flows.prefect_settings import apply_settings

    apply_settings()
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


if __name__ == "__main__":
    grpo(json.loads(sys.argv[1]), sys.argv[2:])
