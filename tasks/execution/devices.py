"""One process per device of this machine, which a run starts once and keeps with what it has loaded.

Rollouts, rewards and updates of a run take turns in them. A process of a GPU sees no other one, so that `cuda` is its
own device for every library and in every thread.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.placement import Device, PlacementSection
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess
from tasks.execution.errors import StageCancelledError
from tasks.execution.resources import resource
from tasks.execution.stopping import StopSignals

_SECONDS_BETWEEN_CHECKS = 1.0


@dataclass(frozen=True, eq=False)
class DeviceProcess:
    """A process, and the device that is its own."""

    process: ChildProcess
    device: Device


class DeviceProcesses:
    """The processes of a run's devices; who waits for one gets StageCancelledError when the run stops at once."""

    def __init__(self) -> None:
        self._placement: PlacementSection | None = None
        self._all: list[DeviceProcess] = []
        self._idle: list[DeviceProcess] = []
        self._changed = threading.Condition()
        # Two that each wait for a process of the other would wait forever.
        self._taking_all = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, placement: PlacementSection, label: str) -> Iterator[DeviceProcess]:
        """Lend a process that is free, preferably the one that last did what `label` names; wait until one is."""
        process = self._take(placement, label)
        try:
            yield process
        finally:
            self._put_back([process])

    @contextlib.contextmanager
    def borrow_all(self, placement: PlacementSection) -> Iterator[list[DeviceProcess]]:
        """Lend all processes, in the order of the devices, once every one is free."""
        taken: list[DeviceProcess] = []
        try:
            with self._taking_all:
                while len(taken) < len(placement.devices):
                    taken.append(self._take(placement, None))
                yield sorted(taken, key=self._all.index)
        finally:
            self._put_back(taken)

    def _take(self, placement: PlacementSection, label: str | None) -> DeviceProcess:
        stop = resource(StopSignals)
        with self._changed:
            self._begin(placement)
            while not self._idle:
                self._changed.wait(_SECONDS_BETWEEN_CHECKS)
                if stop.cancelled.is_set():
                    raise StageCancelledError("the run was stopped before a device was free")
            found = min(self._idle, key=lambda each: each.process.last_label != label)
            self._idle.remove(found)
            return found

    def _put_back(self, processes: list[DeviceProcess]) -> None:
        with self._changed:
            self._idle += [each for each in processes if each in self._all]
            self._idle.sort(key=self._all.index)
            self._changed.notify_all()

    def _begin(self, placement: PlacementSection) -> None:
        known = self._placement
        if known is not None and (known.devices, known.torch_threads) == (placement.devices, placement.torch_threads):
            return
        self.close()
        self._placement = placement
        count = len(placement.devices)
        for number, device in enumerate(placement.devices, start=1):
            name = f"the process of GPU {device}" if isinstance(device, int) else f"process {number} of {count}"
            variables = {"OMP_NUM_THREADS": str(placement.torch_threads), **visible_devices(device)}
            process = ChildProcess(child_command("device"), variables, name)
            self._all.append(DeviceProcess(process, device))
        self._idle = list(self._all)

    def close(self) -> None:
        """Kill every process."""
        for each in self._all:
            each.process.end()
        self._placement, self._all, self._idle = None, [], []


def visible_devices(device: Device) -> Mapping[str, str]:
    """Return the variable that makes a GPU the only one that a process sees; of those that this process sees."""
    if not isinstance(device, int):
        return {}
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": seen[device] if seen else str(device)}
