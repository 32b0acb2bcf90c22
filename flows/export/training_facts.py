"""What a model card says of the training: base, data, rewards, and held-out rewards before and after."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.sections import PolicySection
from flows.export.plan import ExportPlan
from grpo_core.streams import Stream
from tasks.metrics import HELDOUT
from tasks.reports.report import Fact, Table
from tasks.reports.text import number, reward_origin
from tasks.runs.layout import RECOMPUTED, StoredEvaluation, evaluation_folder
from tasks.runs.lookup import spans
from tasks.runs.stored import find_evaluation
from tasks.runs.stored_policies import choose_policy


def training_facts(plan: ExportPlan) -> list[Fact]:
    """Return what trained the exported version, from the base to the digest of its weights."""
    config = plan.config
    files = [PurePosixPath(each.prompts).name for each in config.data.sets]
    averaged = [("weights", "their moving average")] if plan.policy.copy_name == "ema" else []
    revision = f"@{config.policy.revision}" if config.policy.revision is not None else ""
    started = plan.origin.started_from
    return [
        ("base", f"{config.policy.model}{revision}, {plan.base_digest[:16]}"),
        *([("started from", started)] if started is not None else []),
        *((_named("trained", stream, config), _trained(config.policy, stream)) for stream in config.policy.streams),
        ("prompts", ", ".join(files)),
        *_rewards(plan),
        *((_named("loss", stream, config), update.objective) for stream, update in config.updates.items()),
        ("version", f"{plan.policy.version} of {config.run.iterations} updates"),
        *averaged,
        ("weights, sha256", plan.policy.digest),
    ]


def _rewards(plan: ExportPlan) -> list[Fact]:
    """Return the rewards that trained the policy, and of a replay whose rollouts it was trained on."""
    origin = plan.origin
    trained = _weighted(origin.rewards) if origin.rewards is not None else "not known: the rescoring is not there"
    if origin.replay is None:
        return [("rewards", trained)]
    replay, name = origin.replay, origin.rescoring
    facts = [("rewards", trained)]
    if name is not None:
        facts += [("rescored", f"rewards of rescoring {name} of {replay.source}")]
        facts += [("original rewards", _weighted(plan.config.rewards))]
    recomputed = ", advantages computed again" if replay.advantages == RECOMPUTED else ""
    iterations = spans(replay.iterations)
    return [*facts, ("replay", f"of stored rollouts: iterations {iterations} of {replay.source}{recomputed}")]


def _weighted(rewards: Sequence[RewardSection]) -> str:
    return ", ".join(f"{each.label} (weight {each.weight:g})" for each in rewards)


def _trained(policy: PolicySection, stream: Stream) -> str:
    lora = policy.lora_of(stream)
    if policy.adapter is not None:
        return f"the adapter {policy.adapter}"
    return "every weight" if lora is None else f"adapters of rank {lora.rank}, alpha {lora.alpha:g}"


def _named(what: str, stream: Stream, config: RunConfig) -> str:
    """Return the name of a fact about one component; with its stream if several are trained."""
    return what if len(config.policy.streams) == 1 else f"{what}, {stream}"


def heldout_table(plan: ExportPlan) -> Table:
    """Return the mean held-out rewards of the policy that training started from and of the version."""
    before, after = _evaluated_first(plan), _evaluated(plan)
    if after is None:
        return Table("", [], note=f"Version {plan.policy.version} was not evaluated on held-out prompts.")
    prompts = ", ".join(PurePosixPath(each.prompts).name for each in plan.config.evaluate.sets)
    means = {"before": _means(before), f"version {plan.policy.version}": _means(after)}
    origin = reward_origin(HELDOUT, plan.origin.rescoring)
    rows = [
        {"": f"{name}{origin}" if name == "reward" else name}
        | {side: number(known.get(name)) for side, known in means.items()}
        for name in _means(after)
    ]
    start = plan.origin.started_from
    of_start = f" Before is {start}." if start is not None else ""
    return Table("", rows, note=f"Means over {after.rollouts.rows:,} samples of the prompts in {prompts}.{of_start}")


def _evaluated(plan: ExportPlan) -> StoredEvaluation | None:
    return find_evaluation(plan.store, evaluation_folder(plan.policy.version), plan.config, plan.policy)


def _evaluated_first(plan: ExportPlan) -> StoredEvaluation | None:
    """Return the evaluation of the policy that training started from; None where it is not stored."""
    version = plan.origin.first_version
    # The policy of a replay's source is not in this run, which itself makes none of this version.
    initial = None if version else choose_policy(plan.store, 0, plan.base_digest)[0].averaged
    return find_evaluation(plan.store, evaluation_folder(version), plan.config, initial)


def _means(done: StoredEvaluation | None) -> dict[str, float | None]:
    if done is None:
        return {}
    scores = {**done.rewards, **{f"{label} (guardrail)": each for label, each in done.guardrails.items()}}
    labels = {name: name.removesuffix(" (guardrail)") for name in scores}
    means = {name: each.metrics.get(f"rewards/{labels[name]}/mean") for name, each in scores.items()}
    return {"reward": done.advantages.metrics.get("reward"), **means}
