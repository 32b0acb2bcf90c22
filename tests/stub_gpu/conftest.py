"""Programs on the stub GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stub_gpu.build import CannotBuildError, stub_environment

Program = Callable[..., str]


@pytest.fixture(scope="session")
def run_on_stub(request: pytest.FixtureRequest) -> Program:
    """Run a module of this package on the stub with arguments, and return what it writes.

    The build is kept in pytest's cache, for each source and PyTorch.
    """
    try:
        variables = stub_environment(Path(request.config.cache.mkdir("stub_gpu")))
    except CannotBuildError as missing:
        pytest.skip(str(missing))

    def run(module: str, *arguments: str, **settings: str) -> str:
        program = [sys.executable, "-m", f"tests.stub_gpu.{module}", *arguments]
        done = subprocess.run(program, env=os.environ | variables | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run
