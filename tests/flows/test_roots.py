"""A storage root is a name: no character of its path is a pattern for the files of other folders."""

from pathlib import Path

from flows import rescore
from flows.inspect_run import inspect_run
from flows.list_runs import list_runs
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from tests.flows.conftest import Compare, Runs, sha256_of
from tests.flows.replaying.replays import UPDATES, run_replay


def test_a_root_with_the_characters_of_patterns(finished: Runs, final: Compare, tmp_path: Path) -> None:
    # What the root's path is as a pattern is the path of other runs.
    others = finished.copied_to(tmp_path / "r of mine")
    runs, before = Runs(tmp_path / "[r]* {of,a}?mine"), sha256_of(others.root)
    (tmp_path / "r and {of,a} mine").symlink_to(others.root)
    final(runs, runs.start())
    assert runs.start().stages == ()
    runs.path("policies/000002/tokens/adapter_model.safetensors").write_bytes(b"damaged")
    final(runs, runs.start())
    assert len(runs.reasons()) == 1
    rewards = [{"reward": "ssim", "weight": 0.1}, {"reward": "jpeg", "weight": 0.9}]
    done = rescore("run", rewards=rewards, name="mine", root=str(runs.root), progress=False)
    assert done.summary.computed == {"ssim": 0, "jpeg": 8}
    summary, heard = run_replay(runs)
    assert (summary.policy_digest, tuple(heard.stages)) == (runs.policy_digest(2), UPDATES)
    shown = inspect_run("run", root=str(runs.root))
    assert (shown.summary(None).iterations, shown.samples.groups.total) == (2, 2)
    assert {each.run: each.state for each in list_runs(str(runs.root))} == dict.fromkeys(
        ("run", "run-replay"), "finished"
    )
    assert prune(PruneRequest(sources=("run",), root=str(runs.root), images_older_than="0i"))
    assert sha256_of(others.root) == before
