"""What a run keeps between stages: one object per kind and run, closed at the end, seen by the run's threads."""

import contextvars
import threading

from tasks.execution.resources import resource, run_resources


class Kept:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_one_object_per_run_closed_with_it() -> None:
    with run_resources():
        first = resource(Kept)
        assert resource(Kept) is first
        with run_resources():
            inner = resource(Kept)
            assert inner is not first
        assert (inner.closed, first.closed) == (True, False)
        assert resource(Kept) is first
    assert first.closed


def test_threads_that_copy_the_context_share_it() -> None:
    found: list[Kept] = []
    with run_resources():
        for _ in range(4):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(lambda: found.append(resource(Kept)),))
            thread.start()
            thread.join()
        assert found == [resource(Kept)] * 4
