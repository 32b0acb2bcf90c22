"""A function in several processes at once that find each other.

They are forked from a server that has imported the module of the first such function and done nothing else: imports
take many seconds, and a fork of this process would hang in the thread pools of polars.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import start_processes


def in_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a module's function in each of `count` processes, which have joined a process group.

    The first error of one of them ends all and is raised here.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload([function.__module__])
    start_processes(_joined, (count, port, function, arguments), count, start_method="forkserver")


def _joined(rank: int, count: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    dist.init_process_group("gloo")
    function(*arguments)


class ProgressLog:
    """Records what stages report, and calls `then` once when the first piece of work is done."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self.lines: list[str] = []
        self.stages: set[str] = set()
        self.done: list[int] = []
        self.then = then

    def advance(self, stage: str, done: int, total: int) -> None:
        self.stages.add(stage)
        self.done.append(done)
        if done and self.then is not None:
            then, self.then = self.then, None
            then()

    def log(self, line: str) -> None:
        self.lines.append(line)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0, what: Callable[[], object] = str) -> None:
    """Wait for something that happens; the limit only ends a test that fails, with `what` as its message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
