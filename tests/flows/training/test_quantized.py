"""Trainings over a quantized base: the reward rises, a kill changes nothing, exports say what they are."""

from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from flows.export.export import export
from flows.export.plan import plan_export
from flows.pipeline.requests import ExportRequest, SampleRequest
from flows.sample import open_source, sample
from tests.chaos.campaign import Campaign, Plan
from tests.chaos.operations import Golden, Operation
from tests.chaos.processes import forking
from tests.chaos.settings import QUANTIZED, quantized
from tests.flows.conftest import Runs

PLANS = (
    Plan(operation=Operation("rename */iteration_000001/rollouts.manifest.json", 1)),
    Plan(operation=Operation("open */training_state.json", 1)),
    Plan(operation=Operation("rename */metrics.parquet", 1)),
)


@pytest.mark.slow
def test_killed_here_and_there_it_ends_with_the_same_policy(empty: Runs, tmp_path: Path) -> None:
    first = empty.start_text(**{name.replace(".", "__"): value for name, value in QUANTIZED.items()})
    assert first.summary.policy_digest is not None
    golden = Golden(empty, "text", first.summary.policy_digest)
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(tmp_path)}
    with forking(environment, tmp_path / "log") as fork_server:
        campaign = Campaign(golden, quantized, fork_server.start, tmp_path)
        campaign.one_run(iter(PLANS))
    assert campaign.kills == list(PLANS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_reward_rises_and_a_merged_export_says_that_it_is_another_function(empty: Runs, tmp_path: Path) -> None:
    settings = {"policy__lora": {"rank": 16, "alpha": 32.0}, "policy__quantization": {"kind": "nf4"}}
    summary = empty.start_text(run__iterations=16, evaluate__every=0, update__learning_rate=3e-3, **settings).summary
    assert summary.heldout_before is not None
    assert summary.heldout_after is not None
    assert summary.heldout_after > summary.heldout_before + 0.1
    gates = [empty.metrics(number, "text")["sampling/sampling_logp_difference/max"] for number in range(1, 17)]
    assert max(gates) < 1e-4

    request = ExportRequest(run="text", folder=str(tmp_path / "merged"), merged=True, root=str(empty.root))
    exported = export(plan_export(request))
    card = export(plan_export(request.model_copy(update={"folder": str(tmp_path / "own"), "merged": False})))
    usage = Path(card.folder, "README.md").read_text()
    assert "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in usage
    assert "llm_int8_skip_modules=['lm_head'" in usage
    assert exported.quantization is not None
    assert exported.quantization in (tmp_path / "merged" / "README.md").read_text()
    assert "another function" in (tmp_path / "merged" / "README.md").read_text()
    merged = SampleRequest(source=str(tmp_path / "merged"), prompts=("sort the letters of banana",))
    assert len(list(sample(merged, open_source(merged)))) == 1
