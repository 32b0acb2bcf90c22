"""GLM-Image as a policy: its autoregressive half samples image tokens, its diffusion decoder renders them.

settings      how images are sampled, and the token grids of an image size
folder        checks of a saved pipeline's files that load no weights
architecture  the networks' configurations, from a folder or of the release, and the networks on the meta device
loading       a folder or a hub name -> the pipeline
prompts       prompts -> left-padded ids with their positions
sampling      the autoregressive loop
scoring       log-probs of stored tokens
decoding      stored tokens -> images
policy        the Policy protocol on top of these
family        checks and the memory estimate, without importing the models' libraries
"""
