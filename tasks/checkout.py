"""The checkout that this process runs, and the environment for child processes that run it too."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings, and with the checkout in the Python path."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **settings}
