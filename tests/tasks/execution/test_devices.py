"""The processes of devices are lent to one stage each, to an update all at once, and see their own GPU only."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from configs.placement import PlacementSection
from tasks.execution.devices import DeviceProcesses, visible_devices
from tasks.execution.errors import StageCancelledError
from tasks.execution.resources import resource, run_resources
from tasks.execution.stopping import StopSignals

THREE = PlacementSection(devices=("cpu", "cpu", "cpu"))


def test_a_stage_gets_a_free_process_first_the_one_that_did_the_same() -> None:
    devices = DeviceProcesses()
    with devices.borrow(THREE, "score ssim") as first:
        first.process.last_label = "score ssim"
        with devices.borrow(THREE, "score ssim") as second:
            assert second is not first
            second.process.last_label = "collect rollouts"
    with devices.borrow(THREE, "collect rollouts") as again:
        assert again is second
    with devices.borrow(THREE, "score ssim") as again:
        assert again is first


def test_an_update_waits_for_all_and_gets_them_in_order() -> None:
    devices, held, given_back = DeviceProcesses(), threading.Event(), threading.Event()
    order: list[str] = []

    def stage() -> None:
        with devices.borrow(THREE, "a stage"):
            held.set()
            given_back.wait(30)
            order.append("stage")

    def update() -> None:
        with devices.borrow_all(THREE) as processes:
            order.append("update")
            assert [each.process.name for each in processes] == [f"process {number} of 3" for number in (1, 2, 3)]

    with run_resources(), ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(copy_context().run, stage)]
        assert held.wait(30)
        futures += [threads.submit(copy_context().run, update) for _ in range(2)]
        given_back.set()
        for future in futures:
            future.result(30)
    assert order == ["stage", "update", "update"]


def test_nothing_begins_once_the_run_is_stopped_at_once() -> None:
    devices = DeviceProcesses()
    with run_resources(), devices.borrow_all(THREE):
        resource(StopSignals).cancelled.set()
        with pytest.raises(StageCancelledError), devices.borrow(THREE, "a stage"):
            pass


@pytest.mark.parametrize(
    ("seen", "device", "expected"),
    [
        (None, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("4,6,7", 1, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("GPU-aa,MIG-bb", 1, {"CUDA_VISIBLE_DEVICES": "MIG-bb"}),
        ("4,6", "cpu", {}),
    ],
)
def test_indices_count_the_gpus_that_the_run_sees(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, device: int, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices(device) == expected
