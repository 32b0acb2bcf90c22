import itertools
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from flows import watch_run as watching
from flows.watch_run import HOST, RunWatch, create_app, watch_run
from tests.chromium import needs_chromium, opened_tab
from tests.flows.conftest import refused
from tests.flows.rewards.test_server import serving_app
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run


@contextmanager
def served(maker: RunMaker) -> Iterator[str]:
    with serving_app(create_app(RunWatch(maker.store))) as address:
        yield f"{address}/"


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def vanished(*_: object, **__: object) -> None:
    raise FileNotFoundError("it was moved away")


def test_the_page_follows_a_run_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(watching, "SHARE", 1e9)
    maker = RunMaker(tmp_path, planned=3)
    with served(maker) as address:
        assert "0 of 3 iterations" in read(address)
        first = json.loads(read(f"{address}state"))
        assert json.loads(read(f"{address}state"))["tag"] == first["tag"]
        maker.evaluation(0, shift=0.0)
        maker.rollouts("iteration_000001", "i000001")
        state = json.loads(read(f"{address}state"))
        assert state["tag"] != first["tag"]
        assert "iteration 1 has rollouts" in read(address)
        maker.rewards("iteration_000001", "i000001")
        maker.advantages("iteration_000001", "i000001")
        maker.update(1)
        maker.iteration(2)
        before = contents(maker.folder)
        page = read(address)
        assert "2 of 3 iterations" in page
        assert "Images of iteration 2" in page
        # A damaged iteration is named, and the others are shown.
        flip_last_byte(maker.folder / "iteration_000001/rollouts/part-00000.parquet")
        chosen = read(f"{address}?iteration=1")
        assert "Images of iteration 1" in chosen
        assert "iteration_000001/rollouts/part-00000.parquet" in chosen
        assert set(contents(maker.folder)) == set(before)


def test_what_is_not_there_and_other_hosts_are_refused(tmp_path: Path) -> None:
    with served(whole_run(tmp_path)) as address:
        for path, status in (
            ("?iteration=7", 404),
            ("?iteration=x", 404),
            (f"?iteration={'9' * 5000}", 404),
            ("run.json", 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                read(address + path)
            assert error.value.code == status
            error.value.close()
        host = address.removeprefix("http://").rstrip("/")
        connection = HTTPConnection(host, timeout=30)
        connection.request("GET", "/", headers={"Host": "example.org"})
        assert connection.getresponse().status == 400
        connection.close()


def test_a_run_that_cannot_be_read_is_reported_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = whole_run(tmp_path)
    with served(maker) as address:
        with monkeypatch.context() as broken:
            broken.setattr(watching, "read_inspection", vanished)
            with pytest.raises(urllib.error.HTTPError) as error:
                read(address)
            assert error.value.code == 503
            assert b"it was moved away" in error.value.read()
            error.value.close()
        assert "Images of iteration 2" in read(address)


def test_a_browser_that_has_gone_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(whole_run(tmp_path)) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        for asked in (b"GET / HTTP/1.1\r\n", f"GET /state HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode()):
            with socket.create_connection((HOST, port)) as browser:
                browser.sendall(asked)
        assert json.loads(read(f"{address}state"))["status"] == "not running"
    assert capfd.readouterr().err == ""


def test_pages_of_other_iterations_cost_their_share_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was read for 3 of the processor's seconds has taken the share of 30."""
    clock, worked = [1000.0], itertools.count(0.0, 3.0)
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watching.time, "thread_time", lambda: next(worked))
    watch = RunWatch(whole_run(tmp_path).store)
    assert "Images of iteration 1" in watch.page(1)
    with pytest.raises(watching.BusyError) as busy:
        watch.page(2)
    assert busy.value.seconds == 10.0
    assert "Images of iteration 1" in watch.page(1)
    clock[0] += 10.0
    assert "Images of iteration 2" in watch.page(2)


def test_wrong_input(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    with served(maker) as address:
        taken = int(address.rstrip("/").rsplit(":", 1)[1])
        for options, place in (
            ({"name": "none"}, "RUN"),
            ({"iteration": 9}, "--iteration"),
            ({"port": taken}, "--port"),
            ({"port": 70000}, "--port"),
        ):
            asked = {"name": "made", "root": str(tmp_path), "port": 0, "iteration": None, **options}
            (error,) = refused(lambda asked=asked: watch_run(**asked, started=pytest.fail))
            assert error.place == place


@needs_chromium
@pytest.mark.slow
def test_a_browser_takes_over_what_is_new_and_keeps_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = RunMaker(tmp_path / "runs", planned=4)
    for version in (0, 1):
        maker.evaluation(version, shift=version / 10)
    maker.iteration(1)
    with served(maker) as address, opened_tab(tmp_path / "browser") as tab:
        tab.open(address)
        tab.run("document.querySelector('[data-part=next]').click()")
        tab.run("document.querySelector('[type=search]').value = 'blue'")
        tab.run("document.querySelector('[type=search]').dispatchEvent(new Event('input', {bubbles: true}))")
        tab.run("document.querySelector('[data-key=policy]').focus()")
        maker.iteration(2)
        maker.evaluation(2, shift=0.3)
        tab.wait("document.querySelector('.badge').textContent.includes('2 of 4')")
        # The slider stood at the last policy and follows; prompt, search and focus stay.
        assert tab.run("document.querySelector('[data-part=version] b').textContent") == "policy 2"
        assert tab.run("document.querySelector('[data-part=place]').value") == "2 of 2"
        assert tab.run("document.querySelector('[type=search]').value") == "blue"
        assert tab.run("document.activeElement.dataset.key") == "policy"
        assert tab.problems == []
        # An error that stays is shown above all else, until it is gone.
        monkeypatch.setattr(watching, "SECONDS_BETWEEN", 0.0)
        monkeypatch.setattr(watching, "SHARE", 1e9)
        tab.run("setTimeout = call => { globalThis.look = call; }; document.activeElement.blur()")
        tab.wait("Boolean(globalThis.look)")
        maker.evaluation(3, shift=0.4)
        with monkeypatch.context() as broken:
            broken.setattr(watching, "read_inspection", vanished)
            for shown in (False, False, True):
                tab.run("globalThis.look()")
                assert tab.run("Boolean(document.querySelector('[data-failure]'))") == shown
        assert "it was moved away" in tab.run("document.querySelector('main').firstElementChild.textContent")
        tab.run("globalThis.look()")
        assert tab.run("document.querySelector('[data-failure]')") is None
        assert all(each.startswith(address) for each in tab.requests)
