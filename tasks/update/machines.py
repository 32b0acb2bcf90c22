"""Updates on several machines, which torchrun starts, and starts again when one of them dies.

The first machine runs the training. The others wait for its updates and take part in them with their own devices; they
read the same artifacts, so all of them reach the storage root. What they tell each other goes through the TCPStore of
torchrun's agent at MASTER_ADDR, MASTER_PORT, which has no password: use it in a private network.
"""

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from configs.identity import changed_settings
from grpo_core.errors import InputError, raise_all
from tasks.execution.call import code_of
from tasks.execution.errors import ErrorRecord, LostStageError, RemoteStageError, StageCancelledError
from tasks.execution.fingerprint import changed_versions, library_versions
from tasks.progress import log
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.roots import StorageError
from tasks.update.job import SharedJob

SECONDS_BETWEEN_CHECKS = 0.1
SECONDS_TO_ARRIVE = 600.0
_ROOTS = ("tasks.update.process:take_part",)
_COMMAND = (
    "Several machines are started by torchrun, on each: `torchrun --nnodes N --nproc-per-node 1 --max-restarts 3 "
    "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 --no-python grpo train CONFIG`. For one machine unset this."
)


@dataclass(frozen=True)
class Rendezvous:
    """The number of this machine from 0, the number of machines, and where torchrun's agent has its store."""

    rank: int
    count: int
    host: str
    port: int


def claim_rendezvous(variables: MutableMapping[str, str]) -> Rendezvous | None:
    """Take the variables of torchrun, or None for one machine; InputError for another launcher or many processes."""
    host = variables.get("MASTER_ADDR")
    if host is None or variables.get("WORLD_SIZE", variables.get("SLURM_NTASKS", "1")) == "1":
        return None
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise InputError("MASTER_ADDR", host, _COMMAND)
    if (per_machine := variables.get("LOCAL_WORLD_SIZE", "1")) != "1":
        hint = "Start one process per machine; it starts those of the devices that placement.devices names."
        raise InputError("LOCAL_WORLD_SIZE", int(per_machine), hint)
    found = Rendezvous(int(variables["RANK"]), int(variables["WORLD_SIZE"]), host, int(variables["MASTER_PORT"]))
    # Libraries of this process and its children would join a group by themselves.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    return found


class _Machine(BaseModel):
    """What a machine says of itself; its token names this start of it, since the store outlives it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    host: str
    devices: int
    code: str
    libraries: dict[str, str]
    settings: dict[str, Any]  # of the configuration that it was started with


class MachineJob(BaseModel):
    """A job, whose number ascends, as the first machine posts it, with the rank of each machine's first process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: tuple[int, ...]
    count: int
    group: str
    shared: SharedJob
    number: int = 0


class Machines:
    """The machines of a training, seen from one; each start of another has its own keys: `job`, `done`, `cancel`.

    `settings` are those that all have to share, as JSON values.
    """

    def __init__(self, rendezvous: Rendezvous, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.rendezvous, self.settings = rendezvous, dict(settings)
        self._token, self._number = uuid.uuid4().hex, 0
        self._found: dict[int, _Machine] = {}
        with self._answering():
            timeout = timedelta(seconds=SECONDS_TO_ARRIVE)
            store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            self._store = PrefixStore("grpo", store)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            where = f"{self.rendezvous.host}:{self.rendezvous.port}"
            raise LostStageError(f"the store of torchrun at {where} does not answer: {error}") from error

    def _read(self, key: str) -> str | None:
        with self._answering():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _write(self, key: str, text: str) -> None:
        with self._answering():
            self._store.set(key, text)

    # The first machine.

    def others(self) -> dict[int, int]:
        """Return the other machines' numbers of devices once they are there; InputError if one differs from this."""
        ranks, deadline = range(1, self.rendezvous.count), time.monotonic() + SECONDS_TO_ARRIVE
        if not self._found:
            log(f"waiting for {len(ranks)} other machines")
            found = {}
            for rank in ranks:
                while (text := self._read(f"machine/{rank}")) is None:
                    if time.monotonic() > deadline:
                        raise LostStageError(
                            f"machine {rank} has not arrived in {SECONDS_TO_ARRIVE:g} s; what it printed says why"
                        )
                    time.sleep(SECONDS_BETWEEN_CHECKS)
                found[rank] = _Machine.model_validate_json(text)
            self._found = found
        raise_all(problem for rank, machine in self._found.items() for problem in self._differences(rank, machine))
        return {rank: machine.devices for rank, machine in self._found.items()}

    def _differences(self, rank: int, machine: _Machine) -> Iterator[InputError]:
        # As it would be read there: JSON has no infinity.
        place, own = f"machine {rank}", _Machine.model_validate_json(self._own(0).model_dump_json())
        libraries = changed_versions(own.libraries, machine.libraries)
        if libraries or machine.code != own.code:
            which = f"other versions of libraries ({', '.join(libraries)})" if libraries else "other code"
            yield InputError(place, machine.host, f"It has {which} than the first machine; bring both to the same.")
        if settings := changed_settings(own.settings, machine.settings):
            hint = (
                f"It was started with other settings than the first machine: {'; '.join(settings)}. Give all the same."
            )
            yield InputError(place, machine.host, hint)

    def _own(self, devices: int) -> _Machine:
        return _Machine(
            token=self._token,
            host=socket.gethostname(),
            devices=devices,
            code=code_of(_ROOTS),
            libraries=library_versions(),
            settings=self.settings,
        )

    def post(self, job: MachineJob) -> int:
        """Have the other machines take part in a job; return its number."""
        with self._answering():
            number = int(self._store.add("jobs", 1))
        for machine in self._found.values():
            self._write(f"{machine.token}/job", job.model_copy(update={"number": number}).model_dump_json())
        return number

    def wait(self, number: int, rank: int) -> None:
        """Wait until a machine has done its part of a job, or raise what a process of it raised."""
        machine = self._found[rank]
        while not (text := self._read(f"{machine.token}/done") or "").startswith(f"{number} "):
            if self._read(f"{machine.token}/cancel") == str(number):
                raise StageCancelledError(f"the part of machine {rank} was cancelled")
            if _Machine.model_validate_json(self._read(f"machine/{rank}") or "").token != machine.token:
                self._found = {}
                raise LostStageError(f"machine {rank} was started again")
            time.sleep(SECONDS_BETWEEN_CHECKS)
        if failure := text.partition(" ")[2]:
            record = ErrorRecord.model_validate_json(failure)
            raise _at(f"machine {rank}", record)

    def cancel(self, number: int) -> None:
        """Have the other machines end their processes of a job."""
        for machine in self._found.values():
            self._write(f"{machine.token}/cancel", str(number))

    def end(self, *, failed: bool) -> None:
        """Tell the other machines that the training is done, or has failed; torchrun may start a failed one again."""
        if not failed:
            self._write("done", "")
            return
        for machine in self._found.values():
            self._write(f"{machine.token}/failed", "")

    # The others.

    def arrive(self, devices: int) -> None:
        """Tell the first machine that this one is there, with so many devices."""
        self._write(f"machine/{self.rendezvous.rank}", self._own(devices).model_dump_json())

    def next_job(self) -> MachineJob | None:
        """Wait for the next job; None once the training is done, LostStageError if it has failed."""
        while True:
            text = self._read(f"{self._token}/job")
            job = None if text is None else MachineJob.model_validate_json(text)
            if job is not None and job.number > self._number:
                self._number = job.number
                return job
            if self._read("done") is not None:
                return None
            if self._read(f"{self._token}/failed") is not None:
                raise LostStageError("the training on the first machine has failed; its log says why")
            time.sleep(SECONDS_BETWEEN_CHECKS)

    def require_not_cancelled(self) -> None:
        """Raise StageCancelledError if the first machine has cancelled the job."""
        if self._read(f"{self._token}/cancel") == str(self._number):
            raise StageCancelledError("a process of another machine failed")

    def finish(self, number: int, failure: ErrorRecord | None) -> None:
        """Report that the part of this machine is done, or why it failed."""
        text = "" if failure is None else json.dumps(failure.model_dump(mode="json"))
        self._write(f"{self._token}/done", f"{number} {text}")


def _at(machine: str, record: ErrorRecord) -> Exception:
    """Rebuild the error of another machine, which its message names; those that all machines raise alike need none."""
    if record.kind in ("LostStageError", "StageTimeoutError"):
        return LostStageError(f"{machine}: {record.message}")
    error = record.error()
    if isinstance(error, InputError):
        return InputError(f"{machine}: {error.place}", error.value, error.hint)
    if isinstance(error, RemoteStageError):
        return RemoteStageError(f"{machine}: {error.message}", error.trace, error.retryable)
    if isinstance(error, StorageError):
        return StorageError(f"{machine}: {error.place}", error.value, error.reason)
    if isinstance(error, StaleReferenceError):
        return StaleReferenceError(f"{machine}: {error}")
    return error


_MACHINES: ContextVar[Machines | None] = ContextVar("machines", default=None)


def other_machines() -> Machines | None:
    """Return the machines that take part in the updates of this run; None for this one alone."""
    return _MACHINES.get()


def machine_count() -> int:
    """Return how many machines share the updates of this context."""
    machines = other_machines()
    return 1 if machines is None else machines.rendezvous.count


@contextlib.contextmanager
def first_machine(rendezvous: Rendezvous | None, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Have the updates of this context run on all machines, which share these settings; the others end at its end."""
    if rendezvous is None:
        yield
        return
    machines, failed = Machines(rendezvous, settings), True
    token = _MACHINES.set(machines)
    try:
        yield
        failed = False
    finally:
        _MACHINES.reset(token)
        # Where torchrun has ended, the others end too.
        with contextlib.suppress(LostStageError):
            machines.end(failed=failed)
