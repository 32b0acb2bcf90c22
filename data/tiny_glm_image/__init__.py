"""A GLM-Image of the stock transformers and diffusers classes, small enough to train and run on one CPU core.

    components   all hyperparameters, the parts of the pipeline with fresh weights, and the folder that diffusers loads
    training     the token model on imperfect images, flow matching of the decoder, and the quality on held-out captions

The whole recipe: ``build_pipeline``, ``train_autoregressive``, ``train_decoder``, ``save_tiny_model``,
``evaluate_tiny_model``.
"""
