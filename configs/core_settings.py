"""Sections of a configuration -> the records that the core reads, everything that they leave open decided."""

from configs.reward_sections import RewardSection, WatchSection
from configs.schema import (
    AdvantagesSection,
    PolicySection,
    RunConfig,
    UpdateSection,
)
from grpo_core.advantages import AdvantageSettings
from grpo_core.losses import LossSettings, MismatchSettings
from grpo_core.optimizer import OptimizerSettings
from grpo_core.optimizer.schedule import WITH_LENGTH
from grpo_core.parity import ParityTolerance
from grpo_core.policies.trained import LoraSettings, Reference, TrainingChoice
from grpo_core.rewards.hacking import HackingRule
from grpo_core.rewards.mix.terms import RewardTerm
from grpo_core.update import UpdateSettings

PARITY_IN_FP32 = ParityTolerance()
PARITY_IN_16_BITS = ParityTolerance(max_difference=1.0, mean_difference=0.05)


def advantage_settings(section: AdvantagesSection) -> AdvantageSettings:
    """How rewards become advantages.

    Raises:
        InputError: a combination that cannot be.
    """
    return AdvantageSettings(
        baseline=section.baseline,
        scale=section.scale,
        aggregation=section.aggregation,
        eps=section.eps,
        clip=section.clip,
        missing=section.missing,
        drop_constant_groups=section.constant_groups != "keep",
        kl_coef=section.kl_coef,
        kl_estimator=section.kl_estimator,
    )


def reward_term(section: RewardSection) -> RewardTerm:
    """What the reward does in the mix.

    Raises:
        InputError: a combination that cannot be.
    """
    return RewardTerm(
        weight=section.weight,
        role=section.role,
        threshold=section.threshold,
        clamp=section.clamp,
        normalize=section.normalize,
        range=section.range,
    )


def hacking_rule(section: WatchSection) -> HackingRule:
    """When a guardrail's fall counts as a sign."""
    return HackingRule(rise=section.rise, fall=section.fall, patience=section.patience, noise=section.noise)


def training_choice(section: PolicySection, *, reference: Reference, seed: int) -> TrainingChoice:
    """What of the model is trained.

    Args:
        section: the policy's.
        reference: where the reference's weights are kept when every weight is trained.
        seed: of the adapters' random half.
    """
    lora = section.lora
    return TrainingChoice(
        lora=None if lora is None else LoraSettings(lora.rank, lora.alpha, lora.targets),
        frozen=section.frozen,
        reference=reference,
        gradient_checkpointing=section.gradient_checkpointing,
        seed=seed,
    )


def reference_placement(config: RunConfig) -> Reference:
    """Where the reference is kept; nowhere where nothing is measured against it."""
    chosen = config.update.reference.placement
    if chosen != "auto":
        return chosen
    return "device" if config.update.kl_coef > 0 or config.advantages.kl_coef > 0 else "none"


def update_settings(update: UpdateSection, policy: PolicySection) -> UpdateSettings:
    """Sizes, loss and limits of one update.

    Args:
        update: the section.
        policy: the policy's section; its precision decides what parity can be asked for.
    """
    return UpdateSettings(
        epochs=update.epochs,
        minibatch_size=update.minibatch_size,
        micro_batch_size=update.micro_batch_size,
        loss=loss_settings(update),
        entropy_quantile=update.entropy_quantile,
        mask_truncated=update.mask_truncated,
        max_grad_norm=update.max_grad_norm,
        parity=_tolerance(update, in_fp32=policy.dtype == "float32" and policy.autocast is None),
    )


def loss_settings(update: UpdateSection) -> LossSettings:
    """Which loss, its clipping, KL, entropy bonus and corrections.

    Raises:
        InputError: a combination that cannot be.
    """
    return LossSettings(
        loss=update.loss,
        importance_level=update.importance_level,
        clip_range=update.clip_range,
        clip_range_high=update.clip_range_high,
        delta=update.delta,
        ratio_cap=update.ratio_cap,
        sapo_temperature_pos=update.sapo_temperature_pos,
        sapo_temperature_neg=update.sapo_temperature_neg,
        vespo_k_pos=update.vespo_k_pos,
        vespo_lambda_pos=update.vespo_lambda_pos,
        vespo_k_neg=update.vespo_k_neg,
        vespo_lambda_neg=update.vespo_lambda_neg,
        kl_coef=update.kl_coef,
        kl_estimator=update.kl_estimator,
        kl_importance_correction=update.kl_importance_correction,
        entropy_coef=update.entropy_coef,
        mismatch=MismatchSettings(**update.mismatch.model_dump()),
        off_policy_threshold=update.off_policy_threshold,
    )


def with_total_steps(config: RunConfig) -> UpdateSection:
    """The update section with the length of its schedule, where the schedule has one and it was left open."""
    update = config.update
    if update.total_steps is not None or update.lr_scheduler not in WITH_LENGTH:
        return update
    an_epoch = -(-config.rows_per_iteration // (update.minibatch_size or config.rows_per_iteration))
    return update.model_copy(update={"total_steps": config.run.iterations * update.epochs * an_epoch})


def optimizer_settings(update: UpdateSection) -> OptimizerSettings:
    """The optimizer and its schedule.

    Raises:
        InputError: a schedule whose length is not known.
    """
    return OptimizerSettings(
        optimizer=update.optimizer,
        learning_rate=update.learning_rate,
        betas=update.betas,
        eps=update.eps,
        weight_decay=update.weight_decay,
        lr_scheduler=update.lr_scheduler,
        lr_scheduler_kwargs=update.lr_scheduler_kwargs,
        warmup_steps=update.warmup_steps,
        total_steps=update.total_steps,
    )


def _tolerance(update: UpdateSection, *, in_fp32: bool) -> ParityTolerance:
    default, parity = PARITY_IN_FP32 if in_fp32 else PARITY_IN_16_BITS, update.parity
    return ParityTolerance(
        parity.max_difference or default.max_difference, parity.mean_difference or default.mean_difference
    )
