"""Rewards: named, versioned functions from finished images or texts to scores.

- ``scoring_batch``: what a reward gets (``ScoringBatch``) and what it returns (``Score``); ``reward``: what it declares
  about itself.
- ``registry``: the names that a configuration may use, ``build_reward``, and what a reward does in the mix.
- ``model_reward``: rewards computed by a network, its weights and device; ``weights`` finds and checks weight files.
- ``mix``: several rewards of a sample become one, and what happens where one is missing.

Rewards, each a frozen dataclass whose fields are its settings:

- ``similarity``: to a target image: mse, psnr, r2, ssim, lpips.
- ``ocr``: words that an image should show: text_accuracy.
- ``embedding``: clip_score, aesthetic, pickscore, hpsv2, diversity.
- ``judges``: a language model as judge, a text reward model.
- ``image_statistics``: properties of an image, whatever it shows: jpeg, edge_density, sharpness, colour_entropy.
- ``text``: answer, format, box_iou.
- ``functions``: any function written for TRL; ``remote``: any scorer behind HTTP.

To add a reward, write its module and name it in ``registry``; raise its ``version`` whenever the same sample would
get another score. A value is in [0, 1] where that is possible, higher is better; the raw quantity keeps its own unit. A
sample to which the reward does not apply is ``NOT_APPLICABLE``, never a zero; one that could not be scored for another
reason is ``Score.failed`` with the reason.
"""
