"""Rewards: named, versioned functions from finished images or texts to scores.

- ``protocol``: what a reward is given (:class:`~grpo_core.rewards.protocol.ScoringBatch`), what it gives back
  (:class:`~grpo_core.rewards.protocol.Score`) and what it must be able to say about itself.
- ``registry``: the names that a configuration may use, and ``build_reward``.
- ``scoring``: a reward is asked, its answer is checked, and it is said where the scores come from.
- ``mix``: several rewards of a sample become one, and what happens where one is missing.
- ``hacking``: the rule that tells when a policy pleases its reward and does no better.

Rewards, one a file, each a frozen dataclass whose fields are its settings:

- ``likeness``: to a target image: mse, psnr, ssim, lpips.
- ``reading``: the words that an image should show, read by OCR: text_accuracy.
- ``embedding``: CLIP: clip_score, aesthetic.
- ``judges``: models of what people prefer: pickscore, hpsv2, a language model as judge, a text reward model.
- ``looks``: what an image looks like, whatever it shows: jpeg, edge_density, sharpness, colour_entropy, diversity.
- ``completions``: of texts: answer, format, box_iou.
- ``external``: any function written for TRL, and any scorer behind HTTP.

What they share:

- ``image_files``: which kinds of image file are read, and how large an image may be, before it is decoded.
- ``images``: from whatever an image file holds to RGB, to the size of another image, to a tensor.
- ``weights``: weight files: is the right one there, and what is in it.
- ``settings``, ``devices``, ``long_prompts``: checks of a reward's settings, where it computes, and what CLIP cuts off.

To add a reward: write its file, name its class in ``registry``, and raise its ``version`` whenever the same sample
would score otherwise. A value is in [0, 1] where that can be, higher is better; the raw quantity keeps its own unit. A
sample to which the reward does not apply is ``NOT_APPLICABLE``, never a zero; one that something else than the sample
kept from being scored is ``Score.failed`` with the reason.
"""
