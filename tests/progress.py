"""A listener that records the progress of stages."""

from collections.abc import Callable


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
