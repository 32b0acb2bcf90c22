"""Rewards: named, versioned functions from finished images or texts to scores.

- ``reward``: what a reward gets (``ScoringBatch``), what it returns (``Score``) and what it declares about itself.
- ``registry``: the names that a configuration may use, ``build_reward``, and what a reward does in the mix.
- ``model_reward``: rewards computed by a network, its weights and device; ``weights`` finds and checks weight
  files, ``hub`` those on the Hugging Face Hub.
- ``mix``: several rewards of a sample become one, and what happens where one is missing.

Rewards, one per module, each a frozen dataclass whose fields are its settings:

- ``similarity``: to a target image: mse, psnr, r2, ssim; ``lpips``; ``tensors`` has the measures.
- ``ocr``: words that an image should show: text_accuracy.
- ``clip_rewards``: clip_score, aesthetic; ``clip`` finds the CLIP that settings mean.
- ``preference``: pickscore, hpsv2; ``judge``: a language model as judge; ``reward_model``: a text reward model.
- ``image_statistics``: properties of an image, whatever it shows: jpeg, edge_density, sharpness, colour_entropy.
- ``diversity``: how unlike one another the images of a group are.
- ``text``: rewards of texts: answer, format; ``boxes``: of boxes in texts: box_iou.
- ``functions``: any function written for TRL; ``remote``: any scorer behind HTTP.

To add a reward, write its module and name it in ``registry``; raise its ``version`` whenever the same sample would
get another score. A value is in [0, 1] where that is possible, higher is better; the raw quantity keeps its own unit. A
sample to which the reward does not apply is ``NOT_APPLICABLE``, never a zero; one that could not be scored for another
reason is ``Score.failed`` with the reason.
"""
