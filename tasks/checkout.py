"""The checkout that this process runs, and the environment of a process that is to run the same."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def environment(**settings: str) -> dict[str, str]:
    """As it is here, with the checkout in the path whatever folder the process runs in."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **settings}
