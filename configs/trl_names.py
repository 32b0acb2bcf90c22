"""TRL's names of options: those that a configuration takes too, and why others have no setting of the same meaning."""

from collections.abc import Mapping
from types import MappingProxyType

TRL_NAMES: Mapping[str, str] = MappingProxyType(
    {
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
)
"""Path with TRL's name -> path with ours; both mean the same, in the same unit."""

OTHER_MEANING: Mapping[str, str] = MappingProxyType(
    {
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
        "run.num_train_epochs": "Set `run.iterations` to `num_train_epochs` x prompts / "
        "`rollout.prompts_per_iteration`.",
        "run.report_to": "Set `run.trackers` to a list of the same names, such as `[tensorboard, wandb]`, or to `[]`.",
        "run.output_dir": "Set `run.name`, and `storage.root` for the folder of all runs.",
        "update.adam_beta1": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
        "update.adam_beta2": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
        "update.gradient_accumulation_steps": "Set `update.minibatch_size`, the rows of one optimizer step, to "
        "`per_device_train_batch_size` x `gradient_accumulation_steps` x processes.",
        "update.optim": "Set `update.optimizer` to `adamw`, `adamw_8bit`, `paged_adamw` or `paged_adamw_8bit`.",
        "update.ref_model_sync_steps": "Set `update.reference.refresh_every`: it counts iterations, "
        "`ref_model_sync_steps` counts optimizer steps.",
        "update.sync_ref_model": "Set `update.reference.refresh_every` to the iterations between refreshes, or to 0.",
        "update.vllm_importance_sampling_correction": "Set `update.mismatch.mode` to `truncate`, `mask` or `none`.",
        "update.vllm_importance_sampling_mode": "Set `update.mismatch.level` to its first half, `token` or `sequence`, "
        "and `update.mismatch.mode` to its second, `truncate` or `mask`.",
    }
)
"""Path with TRL's name -> what to set instead, in Markdown."""

OTHERWISE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model_init_kwargs": ("policy.dtype, policy.revision, policy.attn_implementation", ""),
        "disable_dropout": ("", "dropout is always off; with it, the ratio on unchanged weights is not 1"),
        "dataset_name dataset_config dataset_streaming": (
            "data.prompts, data.subset, data.streaming",
            "arguments of TRL's scripts, not fields",
        ),
        "dataset_train_split dataset_test_split": (
            "data.split, evaluate.split",
            "arguments of TRL's scripts, not fields",
        ),
        "remove_unused_columns": ("data.columns", "lists the columns that rewards get"),
        "shuffle_dataset": ("data.curriculum", "prompts are sampled in a seeded order"),
        "chat_template_kwargs": (
            "rollout.system_prompt, rollout.chat_template",
            (
                "no other arguments. Conversations are rendered as by trl.data_utils.apply_chat_template; that "
                "continues a last message of the assistant, after which TRL's GRPOTrainer opens another one. A plain "
                "prompt is the user's message if the tokenizer has a template; rollout.chat_template: false gives the"
                " model the text alone, as TRL does. Templates that print the date print January 1, 2025"
            ),
        ),
        "vllm_server_base_url vllm_server_host vllm_server_port": ("rollout.vllm.url", "one server or several"),
        "vllm_server_timeout": ("rollout.vllm.timeout_s", "of one answer, and of the start of a server"),
        (
            "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length "
            "vllm_tensor_parallel_size"
        ): (
            "rollout.vllm.command",
            "options of vllm serve: a server has an environment and a process of its own, never the trainer's",
        ),
        "reward_weights": ("rewards[].weight", ""),
        "vllm_importance_sampling_cap": ("update.mismatch.cap", "deprecated in TRL"),
        "average_tokens_across_devices": ("", "denominators always count all processes"),
        "per_device_eval_batch_size": ("rollout.prompts_per_batch", ""),
        "auto_find_batch_size": ("", "out of memory halves the batch that did not fit, and the run remembers it"),
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs": (
            "policy.gradient_checkpointing",
            "never reentrant",
        ),
        "bf16": ("policy.dtype, policy.autocast", ""),
        "use_cache": ("", "sampling uses a cache, updates do not"),
        "use_cpu": ("placement.devices", ""),
        (
            "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
            "ddp_timeout local_rank"
        ): ("placement.devices", "torch.distributed, with nothing to tune"),
        "fsdp fsdp_config accelerator_config parallelism_config": ("placement.sharding", "fsdp2"),
        "deepspeed": ("placement.sharding", "fsdp2"),
        "data_seed": ("run.seed, evaluate.seed", "every random number is derived from the run's seed"),
        "full_determinism": ("", "on the CPU results are always the same to the bit"),
        "run_name": ("run.name", ""),
        "eval_strategy eval_on_start eval_delay do_eval": (
            "evaluate",
            "the first and the last policy are always evaluated if there are held-out prompts",
        ),
        "do_train do_predict": ("grpo train, grpo evaluate", ""),
        "save_strategy save_steps save_total_limit": (
            "run.keep_policies",
            "every version is stored; last, every and best say which ones stay",
        ),
        "load_best_model_at_end metric_for_best_model greater_is_better": (
            "run.keep_policies.best",
            "by the held-out reward",
        ),
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint": (
            "",
            (
                "the same command resumes at the stage that was interrupted; --continue-from starts a new run from a "
                "policy's weights"
            ),
        ),
        "push_to_hub hub_model_id hub_private_repo hub_revision hub_strategy hub_token hub_always_push": (
            "grpo export --push-to-hub",
            "after training",
        ),
        "project": ("run.project", ""),
        "trackio_bucket_id trackio_space_id trackio_static_space_id": (
            "run.trackers",
            "the trackers' own variables of the environment",
        ),
        "logging_steps logging_strategy logging_first_step": ("", "every iteration"),
        "log_multimodal": ("", "every sample is stored; trackers, reports and grpo inspect show some"),
        "num_completions_to_print log_unique_prompts": ("", "reports show each held-out prompt once"),
        "include_num_input_tokens_seen": ("", "the metric num_tokens"),
        "disable_tqdm log_level log_level_replica log_on_each_node": (
            "",
            (
                "where there is no terminal, one line an iteration, and one every 30 s of a stage that takes longer; "
                "--json for programs"
            ),
        ),
        "warmup_ratio": ("update.warmup_steps", "optimizer steps: multiply the ratio by all steps of the run"),
    }
)
"""Options for which there is another way: what serves the same end, and what differs. Equal ones share an entry."""

LEFT_OUT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "trust_remote_code": ("", "a run would depend on code that no cache key sees"),
        "router_aux_loss_coef": (
            "",
            (
                "the load of experts is not balanced: adapters leave routers frozen, and the term would make the "
                "gradient depend on the split into microbatches. TRL adds it for models whose configuration has a "
                "coefficient"
            ),
        ),
        "cast_lm_head_to_fp32": (
            "",
            (
                "log-probs are fp32; the head's product rounds alike in sampling and scoring, and the parity gate "
                "measures by how much"
            ),
        ),
        "generation_kwargs": (
            "rollout.stop",
            "whatever else changes the distribution would have to be scored the same way",
        ),
        "repetition_penalty": ("", "its distribution depends on the tokens before; log-probs would have to follow it"),
        "cache_implementation": ("", "the siblings of a group share the cache of their prompt"),
        "pad_to_multiple_of": ("", "a microbatch is padded to its longest row"),
        "ds3_gather_for_generation": ("", "without DeepSpeed; see fsdp"),
        "max_tool_calling_iterations": ("", "a rollout is one answer, without tools and environments"),
        "vllm_group_port": ("", "adapters reach a server as files; full weights over NCCL are not sent"),
        "vllm_structured_outputs_regex": (
            "",
            "log-probs would be over the ids that the expression allows, which a server does not return",
        ),
        "transformers_continuous_batching_config use_transformers_paged": (
            "",
            "without it, see use_transformers_continuous_batching",
        ),
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target": (
            "",
            (
                "an update is a function of its inputs, so that it can be cached and replayed; a coefficient that "
                "follows the entropy would be carried from one to the next"
            ),
        ),
        "label_smoothing_factor neftune_noise_alpha": ("", "they are for supervised training"),
        "optim_args optim_target_modules": ("", "for other optimizers"),
        "fp16": ("", "its smallest gradients vanish without a scaled loss"),
        "bf16_full_eval fp16_full_eval": ("", "evaluations use the precision of the training"),
        "tf32": ("", "it stays as torch has it"),
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config": (
            "policy.attn_implementation",
            "sampling and scoring must round alike, and fused kernels serve scoring only",
        ),
        "torch_empty_cache_steps": ("", "lower the sizes of batches instead"),
        (
            "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
            "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor length_column_name "
            "train_sampling_strategy"
        ): ("", "prompts are read once, at the start"),
        (
            "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
            "include_for_metrics label_names prediction_loss_only"
        ): ("", "an evaluation samples and scores; every sample is stored"),
        "save_only_model": ("", "every version that stays can be continued and replayed"),
        "save_on_each_node enable_jit_checkpoint": (
            "",
            "all machines share storage.root; an interrupted stage runs again",
        ),
        "logging_nan_inf_filter": ("", "NaN stops the update and names the samples"),
        "log_completions_hub_repo": ("", "rollouts are Parquet files that datasets loads; upload the ones you want"),
        "skip_memory_metrics debug": ("", "grpo doctor estimates the memory before a run"),
        "max_prompt_length": (
            "rollout.max_completion_length",
            "a prompt is never cut: prompt and completion have to fit the model",
        ),
        "use_liger_loss": ("", "sampling and scoring must round alike, and fused kernels serve scoring only"),
    }
)
"""Options that are left out on purpose: what is nearest, and the reason."""


def reason_for_none(name: str) -> str | None:
    """Return why one of TRL's options has no setting of the same meaning here; None of any other name."""
    for names, (ours, why) in OTHERWISE.items():
        if name in names.split():
            return f"TRL's {name} {f'is {ours}' if ours else 'needs no setting'} here{f': {why}' if why else ''}."
    for names, (ours, why) in LEFT_OUT.items():
        if name in names.split():
            return f"TRL's {name} is left out on purpose: {why}{f'; see {ours}' if ours else ''}."
    return None
