"""Processes that score, one thread each; they live as long as the run and keep their reward's model."""

import atexit
import functools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from configs.reward_sections import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.protocol import Reward
from grpo_core.rewards.registry import build_reward
from tasks.execution.error_records import ErrorRecord, record_of
from tasks.rewards.rows import Row, ScoredRow, score_rows

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_POOLS: dict[str, ProcessPoolExecutor] = {}
_OPENING = threading.Lock()


@dataclass(frozen=True)
class _Job:
    """A batch that a process scores."""

    batch: list[Row]
    pool: ProcessPoolExecutor
    future: Future[list[ScoredRow] | str]


def score_side_by_side(section: RewardSection, batches: Iterable[list[Row]]) -> Iterator[list[ScoredRow]]:
    """Score batches in the section's own processes; the results come in the order of the batches.

    Args:
        section: with processes above 0.
        batches: from `batches_of`; no more of them are read ahead than keep every process busy.

    Raises:
        InputError and others: as the reward raised it; or a process died twice over the same batch.
    """
    waiting: deque[_Job] = deque()
    for batch in batches:
        waiting.append(_submitted(section, batch))
        if len(waiting) >= 2 * section.processes:
            yield _result(section, waiting.popleft())
    while waiting:
        yield _result(section, waiting.popleft())


def _submitted(section: RewardSection, batch: list[Row]) -> _Job:
    pool = _pool(section)
    try:
        future = pool.submit(_score, section.model_dump_json(), batch)
    except BrokenProcessPool:
        _discard(section, pool)
        pool = _pool(section)
        future = pool.submit(_score, section.model_dump_json(), batch)
    return _Job(batch, pool, future)


def _result(section: RewardSection, job: _Job) -> list[ScoredRow]:
    try:
        result = job.future.result()
    except BrokenProcessPool:
        _discard(section, job.pool)
        again = _submitted(section, job.batch)
        try:
            result = again.future.result()
        except BrokenProcessPool as error:
            _discard(section, again.pool)
            hint = "A process that scored died twice over the same samples; lower it, or look at the memory."
            raise InputError(f"rewards.{section.label}.processes", section.processes, hint) from error
    if isinstance(result, str):
        record = ErrorRecord.model_validate_json(result)
        if record.known:
            raise record.error()
        raise RuntimeError(f"reward {section.label}, {record.kind}: {record.message}\n{record.trace}")
    return result


def _pool(section: RewardSection) -> ProcessPoolExecutor:
    with _OPENING:
        key = section.model_dump_json()
        if key not in _POOLS:
            # Not forked: the parent holds threads, a server's connections and perhaps a GPU.
            context = multiprocessing.get_context("spawn")
            _POOLS[key] = ProcessPoolExecutor(section.processes, mp_context=context, initializer=_one_thread)
        return _POOLS[key]


def _discard(section: RewardSection, broken: ProcessPoolExecutor) -> None:
    """Every batch of a broken pool comes by; only the first finds the pool still in use."""
    with _OPENING:
        if _POOLS.get(section.model_dump_json()) is broken:
            del _POOLS[section.model_dump_json()]
    broken.shutdown(wait=False, cancel_futures=True)


def close_scoring_processes() -> None:
    """End every process that scores; the next batch starts them anew."""
    with _OPENING:
        pools = list(_POOLS.values())
        _POOLS.clear()
    for pool in pools:
        pool.shutdown(wait=True, cancel_futures=True)


atexit.register(close_scoring_processes)


def _one_thread() -> None:
    for name in _THREADS:
        os.environ[name] = "1"
    # What is set after torch has read its environment has no effect.
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed sends nothing, and a process of a pool waits for its next batch for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of a pool"
    parent.join()
    os._exit(1)


def _score(section: str, rows: Sequence[Row]) -> list[ScoredRow] | str:
    """In the process: scores, or the error as JSON, since an exception of ours would not come back as what it was."""
    try:
        return score_rows(_reward(section), RewardSection.model_validate_json(section), rows)
    except Exception as error:
        return record_of(error, time.time()).model_dump_json()


@functools.lru_cache(maxsize=1)
def _reward(section: str) -> Reward:
    described = RewardSection.model_validate_json(section)
    return build_reward(described.reward, described.settings)
