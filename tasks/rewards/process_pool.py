"""Rewards scored in child processes of one thread each, which keep the reward's model loaded until the run ends."""

import base64
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from configs.training import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import LostStageError
from tasks.execution.resources import resource
from tasks.progress import listener
from tasks.rewards.rows import Row, score_rows

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def score_in_processes(section: RewardSection, batches: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Score batches in the section's own processes; the results come in the order of the batches.

    Args:
        section: with `processes` above 0.
        batches: from `batches_of`; only as many are read ahead as keep every process busy.

    Raises:
        InputError: as the reward raised it, or a process died twice at the same batch.
        RemoteStageError: the reward raised an error of another class.
    """
    waiting: deque[Future[list[Row]]] = deque()
    # Taken here: each thread's copy of the context would make its own.
    children = resource(ChildProcesses)
    threads = ThreadPoolExecutor(section.processes, thread_name_prefix="scoring")
    try:
        for batch in batches:
            waiting.append(threads.submit(copy_context().run, _score, children, section, batch))
            if len(waiting) >= 2 * section.processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _score(children: ChildProcesses, section: RewardSection, batch: list[Row]) -> list[Row]:
    label, described = f"score {section.label}", section.model_dump_json()
    payload = {"section": described, "rows": [_encoded(row) for row in batch]}
    with children.borrow(described, label, child_command("scoring"), _ONE_THREAD) as process:
        for attempt in (1, 2):
            try:
                rows: list[Row] = process.request(label, payload, None, listener())
                return rows
            except LostStageError as error:
                if attempt == 2:
                    hint = "A scoring process died twice at the same samples; lower it, or check the memory."
                    raise InputError(f"rewards.{section.label}.processes", section.processes, hint) from error
    raise AssertionError("the second attempt returns or raises")


def _encoded(row: Row) -> dict[str, Any]:
    """Write an image's bytes as base64, since rows travel as JSON."""
    image = row.get("image")
    if image is None:
        return dict(row)
    return {**row, "image": {**image, "bytes": base64.b64encode(image["bytes"]).decode()}}


def _decoded(row: Mapping[str, Any]) -> Row:
    image = row.get("image")
    return row if image is None else {**row, "image": {**image, "bytes": base64.b64decode(image["bytes"])}}


def scoring_handler() -> Callable[[dict[str, Any]], list[Row]]:
    """Set this process to one thread, and return the function that scores the parent's batches."""
    # torch may already be imported, so its environment variables come too late.
    import torch

    torch.set_num_threads(1)

    def score(payload: dict[str, Any]) -> list[Row]:
        section = RewardSection.model_validate_json(payload["section"])
        return score_rows(_reward(payload["section"]), section, [_decoded(row) for row in payload["rows"]])

    return score


@functools.lru_cache(maxsize=1)
def _reward(section: str) -> Reward:
    described = RewardSection.model_validate_json(section)
    return build_reward(described.reward, described.settings)
