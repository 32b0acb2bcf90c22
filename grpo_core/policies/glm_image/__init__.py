"""GLM-Image as a policy: its autoregressive half samples image tokens, its diffusion decoder renders them.

settings      how images are sampled, and the token grids of an image size
folder        what a saved pipeline's files say, read without loading anything
architecture  the networks' configurations, of a folder or of the release, and the networks on the meta device
loading       a folder or a hub name -> the pipeline
prompts       prompts -> left-padded ids with their positions
sampling      the autoregressive loop
scoring       log-probs of stored tokens
decoding      stored tokens -> images
policy        all of it behind the Policy protocol
family        the same without importing what its models need, and the memory estimate
"""
