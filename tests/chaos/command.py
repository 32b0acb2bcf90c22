"""The command line with a trail: `python -m tests.chaos.command '{"trail": FILE, ...}' train CONFIG ...`."""

import atexit
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


def grpo(asked: dict[str, Any], arguments: list[str]) -> None:
    """Run the command line in this process, which ends with its exit code.

    Args:
        asked: `trail`, `root`, `fatal` (a name and a number, or null) and `census`, the file for how many
            operations of each name there were by its end.
        arguments: of the command line.
    """
    from flows.prefect_settings import apply_settings

    apply_settings()
    from flows.command_line.main import main
    from tests.chaos.trail import Operation, leave_trail

    fatal = Operation(*asked["fatal"]) if asked["fatal"] else None
    counts = leave_trail(Path(asked["trail"]), asked["root"], fatal)
    sys.argv = ["grpo", *arguments]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        # A forked process must not go on as the one that forks.
        traceback.print_exc()
    Path(asked["census"]).write_text(json.dumps(counts))
    # What a process does when it ends, but for the taking apart of all modules, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    grpo(json.loads(sys.argv[1]), sys.argv[2:])
