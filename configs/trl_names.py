"""TRL's names of options: those that a configuration takes too, and why others have no setting of the same meaning."""

from collections.abc import Iterator, Mapping
from pathlib import Path

TRL_NAMES: Mapping[str, str] = {
    "advantages.multi_objective_aggregation": "advantages.aggregation",
    "advantages.scale_rewards": "advantages.scale",
    "evaluate.num_generations_eval": "evaluate.samples_per_prompt",
    "policy.model_name_or_path": "policy.model",
    "rollout.num_generations": "rollout.group_size",
    "update.adam_epsilon": "update.eps",
    "update.beta": "update.kl_coef",
    "update.epsilon": "update.clip_range",
    "update.epsilon_high": "update.clip_range_high",
    "update.importance_sampling_level": "update.importance_level",
    "update.loss_type": "update.loss",
    "update.lr_scheduler_type": "update.lr_scheduler",
    "update.mask_truncated_completions": "update.mask_truncated",
    "update.num_iterations": "update.epochs",
    "update.off_policy_mask_threshold": "update.off_policy_threshold",
    "update.per_device_train_batch_size": "update.micro_batch_size",
    "update.ref_model_mixup_alpha": "update.reference.mix",
    "update.sapo_temperature_neg": "update.loss_settings.sapo_temperature_neg",
    "update.sapo_temperature_pos": "update.loss_settings.sapo_temperature_pos",
    "update.top_entropy_quantile": "update.entropy_quantile",
    "update.use_bias_correction_kl": "update.kl_importance_correction",
    "update.vespo_k_neg": "update.loss_settings.vespo_k_neg",
    "update.vespo_k_pos": "update.loss_settings.vespo_k_pos",
    "update.vespo_lambda_neg": "update.loss_settings.vespo_lambda_neg",
    "update.vespo_lambda_pos": "update.loss_settings.vespo_lambda_pos",
    "update.vllm_importance_sampling_clip_max": "update.mismatch.cap",
    "update.vllm_importance_sampling_clip_min": "update.mismatch.floor",
}
"""Path with TRL's name -> path with ours; both mean the same, in the same unit."""

OTHER_MEANING: Mapping[str, str] = {
    "evaluate.eval_steps": "Set `evaluate.every`: it counts iterations, `eval_steps` counts optimizer steps.",
    "rollout.generation_batch_size": "Set `rollout.prompts_per_iteration` to `generation_batch_size` / "
    "`num_generations`: it counts prompts, not completions.",
    "rollout.steps_per_generation": "Set `update.minibatch_size` to the rows of one optimizer step.",
    "rollout.use_transformers_continuous_batching": "Leave it out; `rollout.engine` is `policy` or `vllm`.",
    "rollout.use_vllm": "Set `rollout.engine` to `vllm` and `rollout.vllm` to its server (docs/operations.md), or "
    "the engine to `policy`.",
    "run.log_completions": "Leave it out: every sample is stored, and trackers get the held-out ones.",
    "run.max_steps": "Set `run.iterations`: it counts rounds of sampling and training, `max_steps` optimizer "
    "steps. An iteration has `update.epochs` x its rows / `update.minibatch_size` of them.",
    "run.num_train_epochs": "Set `run.iterations` to `num_train_epochs` x prompts / `rollout.prompts_per_iteration`.",
    "run.report_to": "Set `run.trackers` to a list of the same names, such as `[tensorboard, wandb]`, or to `[]`.",
    "run.output_dir": "Set `run.name`, and `storage.root` for the folder of all runs.",
    "update.adam_beta1": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
    "update.adam_beta2": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
    "update.gradient_accumulation_steps": "Set `update.minibatch_size`, the rows of one optimizer step, to "
    "`per_device_train_batch_size` x `gradient_accumulation_steps` x processes.",
    "update.optim": "Set `update.optimizer`: `adamw_torch` is `adamw`, `adamw_bnb_8bit` `adamw_8bit`, `lion_32bit` "
    "`lion`.",
    "update.ref_model_sync_steps": "Set `update.reference.refresh_every`: it counts iterations, "
    "`ref_model_sync_steps` counts optimizer steps.",
    "update.sync_ref_model": "Set `update.reference.refresh_every` to the iterations between refreshes, or to 0.",
    "update.vllm_importance_sampling_correction": "Set `update.mismatch.mode` to `truncate`, `mask` or `none`.",
    "update.vllm_importance_sampling_mode": "Set `update.mismatch.level` to its first half, `token` or `sequence`, "
    "and `update.mismatch.mode` to its second, `truncate` or `mask`.",
}
"""Path with TRL's name -> what to set instead, in Markdown."""


def options_without_setting() -> Iterator[tuple[bool, list[str], str, str]]:
    """Yield TRL's options without a setting of the same meaning: whether they are left out, names, ours, and why."""
    for line in Path(__file__).with_name("trl_options.txt").read_text(encoding="utf-8").splitlines()[1:]:
        how, names, ours, why = (cell.strip() for cell in f"{line} | | |".split("|")[:4])
        yield how == "no", names.split(), ours, why


def reason_for_none(name: str) -> str | None:
    """Return why one of TRL's options has no setting of the same meaning here; None of any other name."""
    for left_out, names, ours, why in options_without_setting():
        if name in names and left_out:
            return f"TRL's {name} is left out on purpose: {why}{f'; see {ours}' if ours else ''}."
        if name in names:
            return f"TRL's {name} {f'is {ours}' if ours else 'needs no setting'} here{f': {why}' if why else ''}."
    return None
