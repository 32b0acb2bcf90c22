"""Rewards: named, versioned functions from finished pictures to scores.

- ``protocol``: what a reward is given (:class:`~grpo_core.rewards.protocol.ScoringBatch`), what it gives back
  (:class:`~grpo_core.rewards.protocol.Score`) and what it must be able to say about itself.
- ``registry``: the names that a configuration may use, and ``build_reward``.
- ``combine``: several rewards of a sample become one, and what happens where one is missing.

Rewards, one a file, each a frozen dataclass whose fields are its settings:

- ``ssim``, ``psnr``, ``lpips``: likeness to a target picture.
- ``jpeg``: how well the picture compresses; needs neither a target nor a text.

What they share:

- ``pictures``: from whatever a picture file holds to RGB, to the size of another picture, to a tensor.
- ``pairs``: scores samples against their targets, one pair at a time.
- ``settings``: the checks of a reward's settings.

To add a reward: write its file, name its class in ``registry.REWARDS``, and raise its ``version`` whenever the same
picture would score otherwise. A value is in [0, 1], higher is better; the raw quantity keeps its own unit. A sample
to which the reward does not apply has ``Score(None, None)``, never a zero.
"""
