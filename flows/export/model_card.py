"""The README.md of an exported folder, with the metadata that the Hugging Face hub reads."""

from pathlib import Path, PurePosixPath

from configs.schema import RunConfig
from configs.sections import PolicySection
from flows.export.plan import ExportPlan
from flows.export.usage import usage
from grpo_core.policies.protocol import policy_family
from grpo_core.streams import Stream
from tasks.reports.report import Fact, Report, Table, markdown_of
from tasks.reports.text import number
from tasks.runs.layout import evaluation_folder
from tasks.runs.records import StoredEvaluation
from tasks.runs.stored import choose_policy, find_evaluation

_LICENCE = (
    "Not stated. The licences of the base model and of the data apply; add yours as `license:` at the top of this file."
)


def model_card(plan: ExportPlan) -> str:
    """Return the card: base, data, rewards, held-out rewards before and after, and how the export is used."""
    exported = plan.repository or plan.folder.name
    sections = {
        "Training": [markdown_of(Report("", _facts(plan)))],
        "Held-out rewards": [markdown_of(Report("", tables=[_heldout(plan)]))],
        "Use": ["```python", usage(plan.config, exported, merged=plan.base is not None), "```"],
        "Licence": [_LICENCE],
    }
    body = [f"# {plan.store.run}, version {plan.policy.version}", "", _summary(plan)]
    for title, lines in sections.items():
        body += ["", f"## {title}", "", *lines]
    return "\n".join(["---", _metadata(plan), "---", "", *body, ""])


def _is_image(plan: ExportPlan) -> bool:
    return policy_family(plan.config.policy.kind).modality == "image"


def _summary(plan: ExportPlan) -> str:
    what = "An image generator" if _is_image(plan) else "A language model"
    several = len(plan.config.policy.streams) > 1
    form = "the adapters of both its parts" if several else "an adapter"
    return f"{what} trained with rewards (GRPO). This is {'the merged model' if plan.base is not None else form}."


def _metadata(plan: ExportPlan) -> str:
    from huggingface_hub import ModelCardData

    of_models = "diffusers" if _is_image(plan) else "transformers"
    library = of_models if plan.base is not None or "denoising" in plan.config.policy.streams else "peft"
    model = plan.config.policy.model
    data = ModelCardData(
        # The hub refuses a name that is none of its own.
        base_model=None if Path(model).expanduser().is_dir() else model,
        library_name=library,
        pipeline_tag="text-to-image" if _is_image(plan) else "text-generation",
        tags=["grpo", *(["lora"] if plan.base is None else [])],
    )
    return str(data.to_yaml())


def _facts(plan: ExportPlan) -> list[Fact]:
    config = plan.config
    files = [PurePosixPath(each.prompts).name for each in config.data.sets]
    rewards = [f"{each.label} (weight {each.weight:g})" for each in config.rewards]
    averaged = [("weights", "their moving average")] if plan.policy.copy_name == "ema" else []
    revision = f"@{config.policy.revision}" if config.policy.revision is not None else ""
    return [
        ("base", f"{config.policy.model}{revision}, {plan.base_digest[:16]}"),
        *((_named("trained", stream, config), _trained(config.policy, stream)) for stream in config.policy.streams),
        ("prompts", ", ".join(files)),
        ("rewards", ", ".join(rewards)),
        *((_named("loss", stream, config), update.objective) for stream, update in config.updates.items()),
        ("version", f"{plan.policy.version} of {config.run.iterations} updates"),
        *averaged,
        ("weights, sha256", plan.policy.digest),
    ]


def _trained(policy: PolicySection, stream: Stream) -> str:
    lora = policy.lora_of(stream)
    if policy.adapter is not None:
        return f"the adapter {policy.adapter}"
    return "every weight" if lora is None else f"adapters of rank {lora.rank}, alpha {lora.alpha:g}"


def _named(what: str, stream: Stream, config: RunConfig) -> str:
    """Return the name of a fact about one component; with its stream if several are trained."""
    return what if len(config.policy.streams) == 1 else f"{what}, {stream}"


def _heldout(plan: ExportPlan) -> Table:
    """Return a table of the mean held-out rewards of the base and of the version, as far as they were evaluated."""
    initial, _ = choose_policy(plan.store, 0, plan.base_digest)
    policies = (initial.averaged, plan.policy)
    found = [find_evaluation(plan.store, evaluation_folder(each.version), plan.config, each) for each in policies]
    before, after = found
    if after is None:
        return Table("", [], note=f"Version {plan.policy.version} was not evaluated on held-out prompts.")
    prompts = ", ".join(PurePosixPath(each.prompts).name for each in plan.config.evaluate.sets)
    means = {"before": _means(before), f"version {plan.policy.version}": _means(after)}
    rows = [{"": name, **{side: number(known.get(name)) for side, known in means.items()}} for name in _means(after)]
    return Table("", rows, note=f"Means over {after.rollouts.rows:,} samples of the prompts in {prompts}.")


def _means(done: StoredEvaluation | None) -> dict[str, float | None]:
    """Return the mean of the mixed reward, of each reward and of each guardrail."""
    if done is None:
        return {}
    scores = {**done.rewards, **{f"{label} (guardrail)": each for label, each in done.guardrails.items()}}
    labels = {name: name.removesuffix(" (guardrail)") for name in scores}
    means = {name: each.metrics.get(f"rewards/{labels[name]}/mean") for name, each in scores.items()}
    return {"reward": done.advantages.metrics.get("reward"), **means}
