"""Kill an action before each of its steps in turn."""

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any


def kill_before_each_step(prepare: Callable[[int], tuple[list[tuple[Any, str]], Callable[[], object]]]) -> None:
    """Print the number of each step before which a forked process was killed; end with the one that was not killed.

    Args:
        prepare: gives, for a step's number from 1, the methods that count as steps (owner and name) and the action.
    """
    for number in itertools.count(1):
        pid = os.fork()
        if pid == 0:
            methods, action = prepare(number)
            left = iter(range(number - 1))
            for owner, name in methods:
                setattr(owner, name, _killed_at_the_end_of(left, getattr(owner, name)))
            action()
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
        print(number, flush=True)


def _killed_at_the_end_of(left: Any, real: Callable[..., object]) -> Callable[..., object]:
    def step(*arguments: Any, **options: Any) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    return step
