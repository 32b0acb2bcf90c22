"""Kill an action before each of its steps in turn."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

Steps = list[tuple[Any, str]]
"""Methods that count as steps: owner and name."""


def kill_before_each_step(prepare: Callable[[int], Callable[[], tuple[Steps, Callable[[], object]]]]) -> None:
    """Print how often the action was started: each time in a forked process, killed one step later than the last.

    Args:
        prepare: prepares the start with this number, from 1, and returns what gives the steps and the action in the
            forked process. The last start comes to its end.
    """
    for number in itertools.count(1):
        begin = prepare(number)
        pid = os.fork()
        if pid == 0:
            (steps, action), left = begin(), iter(range(number - 1))
            for owner, name in steps:
                setattr(owner, name, _killed_at_the_end_of(left, getattr(owner, name)))
            action()
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            print(number)
            break


def _killed_at_the_end_of(left: Iterator[int], real: Callable[..., object]) -> Callable[..., object]:
    def step(*arguments: Any, **options: Any) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    return step
