"""What an exported folder says of itself: its README.md."""

from pathlib import Path
from types import MappingProxyType

from configs.rollouts import VisionRolloutSection
from configs.schema import RunConfig
from flows.export.plan import ExportPlan
from flows.export.training_facts import heldout_table, training_facts
from flows.export.usage import edits, usage
from grpo_core.policies.protocol import policy_family
from tasks.reports.report import Report, markdown_of

_LICENCE = (
    "Not stated. The licences of the base model and of the data apply; add yours as `license:` at the top of this file."
)


def another_function(quantization: str, kind: str) -> str:
    """Say what an export, adapter or merged, of adapters over a quantized base computes."""
    trained = f"The adapters were trained over a base in {quantization}."
    if kind == "adapter":
        return f"{trained} Over a base that is not quantized in the same way they are another function."
    return f"{trained} Merged into the unquantized base they are another function than the policy."


def model_card(plan: ExportPlan) -> str:
    """Return the card: base, data, rewards, held-out rewards before and after, and how the export is used."""
    exported = plan.repository or plan.folder.name
    sections = {
        "Training": [markdown_of(Report("", training_facts(plan)))],
        "Held-out rewards": [markdown_of(Report("", tables=[heldout_table(plan)]))],
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


_KINDS = MappingProxyType(
    {
        "text-to-image": "An image generator",
        "image-to-image": "An image editor",
        "text-generation": "A language model",
        "image-text-to-text": "A vision-language model",
    }
)
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
