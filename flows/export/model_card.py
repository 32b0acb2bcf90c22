"""What an exported folder says of itself: its README.md, with base, data, rewards, evaluation and verification."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from configs.rollouts import VisionRolloutSection
from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.sections import PolicySection
from flows.export.evaluated import evaluation_report, verification_section
from flows.export.plan import ExportPlan
from flows.export.usage import edits, usage
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.streams import Stream
from tasks.reports.report import Fact, Report, markdown_of
from tasks.reports.text import in_cell
from tasks.runs.layout import RECOMPUTED
from tasks.runs.lookup import spans
from tasks.verification.card import verdict
from tasks.verification.evaluation_card import EvaluationCard

_LICENCE = (
    "Not stated. The licences of the base model and of the data apply; add yours as `license:` at the top of this file."
)


def another_function(quantization: str, kind: str) -> str:
    """Say what an export, adapter or merged, of adapters over a quantized base computes."""
    trained = f"The adapters were trained over a base in {quantization}."
    if kind == "adapter":
        return f"{trained} Over a base that is not quantized in the same way they are another function."
    return f"{trained} Merged into the unquantized base they are another function than the policy."


def model_card(plan: ExportPlan, evaluation: EvaluationCard | None) -> str:
    """Return the card: base, data, rewards, how it was evaluated and verified, and how the export is used."""
    exported = plan.repository or plan.folder.name
    sections = {
        "Training": [markdown_of(Report("", training_facts(plan))).rstrip()],
        "Evaluation": [markdown_of(evaluation_report(plan, evaluation)).rstrip()],
        "Verification": [*_verdict(plan), markdown_of(verification_section(plan), level=2).rstrip()],
        "Use": ["```python", usage(plan.config, exported, merged=plan.base is not None), "```"],
        "Licence": [_LICENCE],
    }
    body = [f"# {plan.store.run}, version {plan.policy.version}", "", _summary(plan)]
    if (quantization := plan.config.policy.quantization) is not None:
        kind = "adapter" if plan.base is None else "merged"
        body += ["", another_function(quantization.description, kind)]
    for title, lines in sections.items():
        body += ["", f"## {title}", "", *lines]
    return "\n".join(["---", _metadata(plan), "---", "", *body, ""])


_KINDS = {
    "text-to-image": "An image generator",
    "image-to-image": "An image editor",
    "text-generation": "A language model",
    "image-text-to-text": "A vision-language model",
}
"""What a model of each of the hub's tasks is called."""


def hub_task(config: RunConfig) -> str:
    """Return the hub's name of what a run's model does: its `pipeline_tag`."""
    if isinstance(config.rollout, VisionRolloutSection):
        return "image-text-to-text"
    if policy_family(config.policy.kind).modality == "text":
        return "text-generation"
    return "image-to-image" if edits(config) else "text-to-image"


def _summary(plan: ExportPlan) -> str:
    what = _KINDS[hub_task(plan.config)]
    several = len(plan.config.policy.streams) > 1
    form = "the adapters of both its parts" if several else "an adapter"
    return f"{what} trained with rewards (GRPO). This is {'the merged model' if plan.base is not None else form}."


def _verdict(plan: ExportPlan) -> list[str]:
    return [] if plan.verification is None else [f"{in_cell(verdict(plan.verification))}.", ""]


def _metadata(plan: ExportPlan) -> str:
    from huggingface_hub import ModelCardData

    image = policy_family(plan.config.policy.kind).modality == "image"
    of_models = "diffusers" if image else "transformers"
    library = of_models if plan.base is not None or "denoising" in plan.config.policy.streams else "peft"
    model = plan.config.policy.model
    data = ModelCardData(
        # The hub refuses names that it does not know.
        base_model=None if Path(model).expanduser().is_dir() else model,
        library_name=library,
        pipeline_tag=hub_task(plan.config),
        tags=["grpo", *(["lora"] if plan.base is None else [])],
    )
    return str(data.to_yaml())


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
