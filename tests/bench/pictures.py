"""Pictures of what runs show in a browser: their pages, Prefect's UI and TensorBoard.

`python -m tests.bench.pictures` trains small runs in a folder of its own with a server of its own, and writes the
pictures that docs/runs.md and docs/operations.md show. It needs Chromium
(apt-get install chromium).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import httpx

from flows.inspect_run import inspect_run
from flows.list_runs import list_runs, write_list_page
from tasks.execution.server_process import free_port
from tasks.process import CHECKOUT
from tests.bench.sick_runs import CONFIG, EVALUATED
from tests.chromium import PROGRAM, Tab, opened_tab
from tests.servers import GrpoUi, grpo_ui

DOCS = CHECKOUT / "docs"
TINY: Mapping[str, Any] = {"run.iterations": 20, "evaluate.every": 2, "run.trackers": ["tensorboard"]}
LETTERS: Mapping[str, Any] = {"run.iterations": 16, "evaluate.every": 4}
OF_MANY: Mapping[str, Mapping[str, Any]] = {
    **{f"letters-{seed}": {"run.seed": seed} for seed in range(3)},
    **{f"slow-{seed}": {"run.seed": seed, "update.learning_rate": 2e-4} for seed in range(2)},
    "rate-too-high": {"update.learning_rate": 0.05},
}
SECONDS_A_COMPLETION = 0.15
_PATIENCE = 600.0


def slow_letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward for long answers, whatever they say, from a judge that takes its time."""
    time.sleep(SECONDS_A_COMPLETION * len(completions))
    return [len(text) / 24 for text in completions]


HACKED: Mapping[str, Any] = {
    **EVALUATED,
    "rollout.prompts_per_iteration": 8,
    "rollout.prompts_per_batch": 8,
    "rewards": [
        {
            "reward": "function",
            "name": "pleasing",
            "batch_size": 4,
            "settings": {"function": f"{Path(__file__).resolve()}:slow_letters"},
        }
    ],
    "update.minibatch_size": 64,
    "update.micro_batch_size": 64,
    "update.learning_rate": 5e-4,
    "guardrails": {"rewards": [{"reward": "answer"}], "patience": 1, "on_fall": "pause"},
}


def main() -> None:
    """Make all of them."""
    assert PROGRAM is not None, "pictures are taken with Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="grpo-pictures-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        root, paused = folder / "runs", folder / "paused"
        with grpo_ui(folder / "prefect", {}) as ui, opened_tab(folder / "browser") as tab:
            with _training(ui, "tiny", "configs/tiny.yaml", TINY, root):
                pass
            _report(ui, tab)
            with _training(ui, "hacked", CONFIG, HACKED, paused, ends=False):
                _progress(ui, tab)
                _paused(ui, tab)
            for name, settings in OF_MANY.items():
                with _training(ui, name, CONFIG, {**LETTERS, **settings}, root):
                    pass
            _run_page(tab, root)
            _sick_page(tab, root)
            _list_page(tab, root)
            _tensorboard(tab, root / "tiny" / "tensorboard")


@contextmanager
def _training(
    ui: GrpoUi, name: str, config: str, settings: Mapping[str, Any], root: Path, *, ends: bool = True
) -> Iterator[None]:
    """A training in a process of its own, which is waited for, or killed where it does not end by itself."""
    chosen = {**settings, "run.name": name, "storage.root": str(root)}
    pairs = [part for key, value in chosen.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "flows.command_line.main", "train", config, *pairs]
    print(name, file=sys.stderr, flush=True)
    with subprocess.Popen(
        command, cwd=CHECKOUT, env={**os.environ, **ui.environment, "PREFECT_API_URL": ui.api_url}
    ) as process:
        try:
            yield
            code = process.wait() if ends else 0
            assert code == 0, f"{name} ended with {code}"
        finally:
            process.kill()


def _wait(found: Callable[[], Any]) -> Any:
    """Wait until something is there, and return it."""
    end = time.monotonic() + _PATIENCE
    while not (answer := found()):
        assert time.monotonic() < end, "what the picture is to show has not happened"
        time.sleep(0.5)
    return answer


def _latest(ui: GrpoUi, key: str) -> dict[str, Any] | None:
    """Prefect's last artifact with this key."""
    asked = {"artifacts": {"key": {"any_": [key]}}}
    found = httpx.post(f"{ui.api_url}/artifacts/latest/filter", json=asked).raise_for_status().json()
    return found[0] if found else None


def _shown(tab: Tab, path: Path, address: str, has: str, width: int, height: int, closed: str = "none") -> None:
    """Take a picture of a page of a UI once it shows a text, and has come to rest with an element clicked."""
    tab.open(address, width, height)
    tab.wait(f"document.body.innerText.includes({has!r})", seconds=60)
    tab.run(f"document.querySelector({closed!r})?.click()")
    time.sleep(3)
    tab.screenshot(path)


def _page_of(ui: GrpoUi, rest: str) -> str:
    return f"{ui.api_url.removesuffix('/api')}/{rest}"


def _report(ui: GrpoUi, tab: Tab) -> None:
    report = _latest(ui, "grpo-tiny-report")
    assert report is not None
    address = _page_of(ui, f"artifacts/artifact/{report['latest_id']}")
    _shown(tab, DOCS / "prefect_report.png", address, "iteration 20", 860, 1400)


def _progress(ui: GrpoUi, tab: Tab) -> None:
    def half() -> dict[str, Any] | None:
        artifact = _latest(ui, "grpo-hacked-score-pleasing")
        return artifact if artifact and 30 < float(artifact["data"]) < 90 else None

    address = _page_of(ui, f"artifacts/artifact/{_wait(half)['latest_id']}")
    _shown(tab, DOCS / "prefect_progress.png", address, "score pleasing", 1400, 520)


def _paused(ui: GrpoUi, tab: Tab) -> None:
    def paused() -> dict[str, Any] | None:
        asked = {"flow_runs": {"name": {"any_": ["hacked"]}, "state": {"type": {"any_": ["PAUSED"]}}}}
        found = httpx.post(f"{ui.api_url}/flow_runs/filter", json=asked).raise_for_status().json()
        return found[0] if found else None

    address = _page_of(ui, f"runs/flow-run/{_wait(paused)['id']}")
    _shown(tab, DOCS / "prefect_paused.png", address, "paused after iteration", 1400, 1400)


def _run_page(tab: Tab, root: Path) -> None:
    inspect_run("tiny", root=str(root), html=root / "tiny.html")
    tab.open((root / "tiny.html").as_uri(), 1280, 780)
    for selector, value in (("[data-smoothing] input", 0.5), ("[data-part=slider]", 7)):
        found = f"document.querySelector({selector!r})"
        tab.run(f"(e => {{ e.value = {value}; e.dispatchEvent(new Event('input')) }})({found})")
    tab.run("scrollTo(0, 0)")
    tab.point("[data-hero] .wide svg", 0.3)
    tab.run("scrollTo(0, 0)")
    tab.screenshot(DOCS / "run_page.png")


def _sick_page(tab: Tab, root: Path) -> None:
    inspect_run("rate-too-high", root=str(root), html=root / "sick.html")
    tab.open((root / "sick.html").as_uri(), 1280, 830, dark=True)
    tab.screenshot(DOCS / "run_page_signs.png")


def _list_page(tab: Tab, root: Path) -> None:
    # The page's title is the root as it was named.
    with chdir(root.parent):
        write_list_page(root.name, list_runs(root.name), Path("list.html"))
    tab.open((root.parent / "list.html").as_uri(), 1280, 1000)
    tab.screenshot(DOCS / "list_page.png")


def _tensorboard(tab: Tab, folder: Path) -> None:
    """Held-out samples and rewards, with the filter of tags that the picture shows."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder.parent.parent)]
    options = ("--host", "127.0.0.1", "--port", str(port))
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}/"

            def answers() -> bool:
                try:
                    return httpx.get(address).is_success
                except httpx.TransportError:
                    return False

            _wait(answers)
            tags = "%5Ereward%24%7Cheldout.(01%7C05)%7Cheldout_reward"
            page = f"{address}?tagFilter={tags}#timeseries"
            _shown(tab, DOCS / "tensorboard.png", page, "heldout_reward", 1200, 820, closed="button.settings-button")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
