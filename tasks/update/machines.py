"""Updates on several machines: the same command on each, started by torchrun, by srun or by hand.

The first machine runs the training. The others wait for its updates and take part in them with their own devices; they
read the same artifacts, so all of them reach the storage root. What they tell each other goes through the TCPStore of
torch.distributed at MASTER_ADDR, MASTER_PORT, which has no password: use it in a private network.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo_core.errors import InputError
from tasks.execution.call import code_of
from tasks.execution.errors import ErrorRecord, LostStageError, StageCancelledError
from tasks.progress import log
from tasks.update.job import SharedJob

SECONDS_BETWEEN_CHECKS = 0.1
SECONDS_BETWEEN_BEATS = 5.0
SECONDS_WITHOUT_BEAT = 60.0
SECONDS_TO_ARRIVE = 1800.0
SECONDS_TO_LEAVE = 10.0
_PORT = 29500
_ROOTS = ("tasks.update.process:take_part",)


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a training find each other.

    Attributes:
        rank: number of this machine, from 0.
        count: number of machines.
        serves: whether this process opens the store; torchrun has opened its own.
    """

    rank: int
    count: int
    host: str
    port: int
    serves: bool


def claim_rendezvous(variables: MutableMapping[str, str]) -> Rendezvous | None:
    """Read the variables of torchrun, or MASTER_ADDR with those of Slurm; None for one machine.

    They are removed, since libraries of this process and its children would join a group by themselves.

    Raises:
        InputError: some are missing or contradictory, or there are several processes per machine.
    """
    host = variables.get("MASTER_ADDR")
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if "RANK" not in variables and "SLURM_PROCID" in variables:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    count = _number(variables, names[1], 1)
    if host is None or count == 1:
        return None
    rank, per_machine = _number(variables, names[0], None), _number(variables, names[2], 1)
    if rank >= count:
        raise InputError(names[0], rank, f"There are {count} ({names[1]}); they are numbered from 0.")
    if per_machine > 1:
        hint = "Start one process per machine; it starts those of the devices that placement.devices names."
        raise InputError(names[2], per_machine, hint)
    port = _number(variables, "MASTER_PORT", _PORT)
    serves = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    return Rendezvous(rank, count, host, port, serves)


def _number(variables: MutableMapping[str, str], name: str, default: int | None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise InputError(name, text, "It is a number, as torchrun sets it; without MASTER_ADDR one machine is used.")
    return int(text)


class _Machine(BaseModel):
    """What a machine says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    devices: int
    code: str


class MachineJob(BaseModel):
    """A job as the first machine posts it.

    Attributes:
        first: rank of each machine's first process.
        count: number of processes.
        group: name of the processes' group.
        shared: without a member.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: tuple[int, ...]
    count: int
    group: str
    shared: SharedJob


@dataclass
class Machines:
    """The machines of a training, seen from one of them, while it is in the context.

    Attributes:
        number: of the last job.
    """

    rendezvous: Rendezvous
    number: int = 0
    _beats: dict[int, tuple[str, float]] = field(default_factory=dict)

    def __enter__(self) -> "Machines":
        given = self.rendezvous
        # By their addresses the machines know the first one; a loopback address needs no other interface.
        own: dict[str, Any] = {}
        if given.serves and given.host in ("localhost", "127.0.0.1"):
            own["master_listen_fd"] = socket.create_server(("127.0.0.1", given.port)).detach()
        self._tcp = TCPStore(
            given.host,
            given.port,
            is_master=given.serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=SECONDS_TO_ARRIVE),
            **own,
        )
        self._store = PrefixStore("grpo", self._tcp)
        self._left = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="machines").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        if self.rendezvous.rank:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set("end", "failed" if exception[0] else "done")
            # They read it from the store of this process.
            limit = time.monotonic() + SECONDS_TO_LEAVE
            present = [rank for rank in range(1, self.rendezvous.count) if self._get(f"machine/{rank}")]
            while present and time.monotonic() < limit:
                present = [rank for rank in present if self._get(f"left/{rank}") is None]
                time.sleep(SECONDS_BETWEEN_CHECKS)

    def _beat(self) -> None:
        store = PrefixStore("grpo", self._tcp.clone())
        number = 0
        with contextlib.suppress(RuntimeError):
            while not self._left.wait(0.0 if number == 0 else SECONDS_BETWEEN_BEATS):
                number += 1
                store.set(f"beat/{self.rendezvous.rank}", str(number))

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _require_alive(self, rank: int) -> None:
        """Raise LostStageError for a machine whose beats have stopped, by the clock of this one."""
        beat, now = self._get(f"beat/{rank}") or "", time.monotonic()
        if self._beats.get(rank, ("none", now))[0] != beat:
            self._beats[rank] = (beat, now)
        if now - self._beats[rank][1] > SECONDS_WITHOUT_BEAT:
            raise LostStageError(f"machine {rank} has not answered for {SECONDS_WITHOUT_BEAT:g} s")

    # The first machine.

    def others(self) -> dict[int, int]:
        """Wait until the other machines are there, and return their numbers of devices by rank.

        Raises:
            InputError: one of them runs other code.
            LostStageError: one has not come within half an hour.
        """
        missing, found = list(range(1, self.rendezvous.count)), {}
        limit, waits = time.monotonic() + SECONDS_TO_ARRIVE, False
        while missing:
            for rank in list(missing):
                if (text := self._get(f"machine/{rank}")) is not None:
                    found[rank] = _Machine.model_validate_json(text)
                    missing.remove(rank)
            if missing and not waits:
                waits = True
                log(f"waiting for {len(missing)} of {self.rendezvous.count} machines")
            if missing and time.monotonic() > limit:
                raise LostStageError(f"machines {missing} have not come within {SECONDS_TO_ARRIVE:g} s")
            time.sleep(SECONDS_BETWEEN_CHECKS if missing else 0.0)
        own = code_of(_ROOTS)
        for rank, machine in found.items():
            if machine.code != own:
                hint = "It has other code or libraries than the first machine; bring both to the same state."
                raise InputError(f"machine {rank}", machine.host, hint)
        return {rank: machine.devices for rank, machine in found.items()}

    def post(self, job: MachineJob) -> int:
        """Have the other machines take part in a job; return its number."""
        self.number += 1
        self._store.set(f"job/{self.number}", job.model_dump_json())
        return self.number

    def wait(self, number: int, rank: int) -> None:
        """Wait until a machine has done its part of a job, or has failed at it.

        Raises:
            LostStageError: it has died.
            StageCancelledError: the job was cancelled.
            Exception: what a process of it raised.
        """
        while (text := self._get(f"done/{number}/{rank}")) is None:
            if self._get(f"cancel/{number}") is not None:
                raise StageCancelledError(f"the part of machine {rank} was cancelled")
            self._require_alive(rank)
            time.sleep(SECONDS_BETWEEN_CHECKS)
        if text:
            record = ErrorRecord.model_validate_json(text)
            if record.kind in ("LostStageError", "StageTimeoutError"):
                raise LostStageError(f"machine {rank}: {record.message}")
            raise record.error()

    def cancel(self, number: int) -> None:
        """Have the other machines end their processes of a job."""
        self._store.set(f"cancel/{number}", "")

    # The others.

    def arrive(self, devices: int) -> None:
        """Tell the first machine that this one is there, with so many devices."""
        machine = _Machine(host=socket.gethostname(), devices=devices, code=code_of(_ROOTS))
        self._store.set(f"machine/{self.rendezvous.rank}", machine.model_dump_json())

    def next_job(self) -> MachineJob | None:
        """Wait for the next job; None once the training is done.

        Raises:
            LostStageError: the first machine has died, or its training has failed.
        """
        while (text := self._get(f"job/{self.number + 1}")) is None:
            end = self._get("end")
            if end is not None:
                self._store.set(f"left/{self.rendezvous.rank}", "")
                if end != "done":
                    raise LostStageError("the training on the first machine has failed; its log says why")
                return None
            self._require_alive(0)
            time.sleep(SECONDS_BETWEEN_CHECKS)
        self.number += 1
        return MachineJob.model_validate_json(text)

    def require_not_cancelled(self) -> None:
        """Raise StageCancelledError if the first machine has cancelled the job, LostStageError if it has died."""
        self._require_alive(0)
        if self._get(f"cancel/{self.number}") is not None:
            raise StageCancelledError("a process of another machine failed")

    def finish(self, number: int, failure: ErrorRecord | None) -> None:
        """Report that the part of this machine is done, or why it failed."""
        text = "" if failure is None else json.dumps(failure.model_dump(mode="json"))
        self._store.set(f"done/{number}/{self.rendezvous.rank}", text)


_MACHINES: ContextVar[Machines | None] = ContextVar("machines", default=None)


def other_machines() -> Machines | None:
    """Return the machines that take part in the updates of this run; None for this one alone."""
    return _MACHINES.get()


def machine_count() -> int:
    """Return how many machines share the updates of this context."""
    machines = other_machines()
    return 1 if machines is None else machines.rendezvous.count


@contextlib.contextmanager
def first_machine(rendezvous: Rendezvous | None) -> Iterator[None]:
    """Have the updates of this context run on all machines; the others leave at its end."""
    if rendezvous is None:
        yield
        return
    with Machines(rendezvous) as machines:
        token = _MACHINES.set(machines)
        try:
            yield
        finally:
            _MACHINES.reset(token)
