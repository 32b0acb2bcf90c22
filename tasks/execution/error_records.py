"""Errors between processes, as JSON: those that a person reads come back as what they were. Nothing is unpickled."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict

from grpo_core.errors import FailedSamplesError, InputError, NonFiniteError
from grpo_core.parity import ParityError, ParityReport, ParityTolerance
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.filesystem.failures import StorageError


class ErrorRecord(BaseModel):
    """One process's error.

    Attributes:
        kind: name of its class.
        arguments: what it is built from; empty where its class is not among those that come back.
        message: for people.
        trace: for programmers.
        seconds: when it happened, since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    arguments: tuple[Any, ...]
    message: str
    trace: str
    seconds: float

    @property
    def known(self) -> bool:
        """Whether it comes back as what it was."""
        return self.kind in _BUILDERS

    def error(self) -> Exception:
        """The error again."""
        return _BUILDERS[self.kind](*self.arguments)


def record_of(error: Exception, seconds: float) -> ErrorRecord:
    """An error that was caught, as a record."""
    # Whatever kind of wrong input it is, it comes back as wrong input.
    kind = "InputError" if isinstance(error, InputError) else type(error).__name__
    return ErrorRecord(
        kind=kind,
        arguments=_arguments(error) if kind in _BUILDERS else (),
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        seconds=seconds,
    )


def _arguments(error: Exception) -> tuple[Any, ...]:
    if isinstance(error, FailedSamplesError):
        return (error.reward, list(error.failed), error.total, error.limit)
    if isinstance(error, InputError):
        return (error.place, error.value if isinstance(error.value, _PLAIN) else str(error.value), error.hint)
    if isinstance(error, NonFiniteError):
        return (error.quantity, list(error.sample_ids), error.hint)
    if isinstance(error, ParityError):
        return (asdict(error.report), asdict(error.tolerance))
    if isinstance(error, StorageError):
        return (error.place, error.value, error.reason)
    return (str(error),)


def _parity_error(report: Mapping[str, Any], tolerance: Mapping[str, Any]) -> ParityError:
    samples = tuple(report["worst_samples"])
    return ParityError(ParityReport(**{**report, "worst_samples": samples}), ParityTolerance(**tolerance))


_PLAIN = (str, int, float, bool, list, type(None))
_BUILDERS: Mapping[str, Callable[..., Exception]] = MappingProxyType(
    {
        "FailedSamplesError": FailedSamplesError,
        "InputError": InputError,
        "NonFiniteError": NonFiniteError,
        "ParityError": _parity_error,
        "StaleReferenceError": StaleReferenceError,
        "StorageError": StorageError,
        "ValueError": ValueError,
    }
)
