"""The checkout that this process runs: its version, and the environment for child processes that run it too."""

import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings, and with the checkout in the Python path."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **settings}


def code_version() -> str | None:
    """Return the checkout's commit, with `-dirty` where files were changed; None outside a git checkout."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
