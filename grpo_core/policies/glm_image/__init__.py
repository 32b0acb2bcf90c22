"""GLM-Image as a policy: image tokens are the actions, the diffusion decoder is part of the environment.

    settings    how images are drawn
    geometry    image size -> the two token grids
    prompts     prompt -> input ids and the three-axis positions of everything that follows
    sampling    the autoregressive loop with its own cache
    scoring     teacher-forced log-probs of stored tokens
    decoding    stored tokens -> image
    folder      what a saved pipeline's files say without loading it
    loading     a folder or hub name -> the pipeline's components
    policy      the policy made of these
    family      the same without importing what its models need

    architecture   the networks by their configurations alone, built without memory
    released       the released model's configurations, for where its files are not at hand
    sizes          the numbers of a model that its memory depends on
    activations    bytes of the tensors that sampling, updating and decoding make
    memory         an estimate of the GPU memory that a configuration needs

Zhipu AI, 2026, GLM-Image model card (zai-org/GLM-Image); modelling code in transformers and diffusers.
"""
