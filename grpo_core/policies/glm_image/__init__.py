"""GLM-Image as a policy: its autoregressive half samples image tokens, its diffusion decoder renders them.

settings        how images are sampled, the token grids of an image size, and checks of files that load no weights
loading         the networks' configurations, the networks on the meta device, and the pipeline
processor       grids of tokens of any size in a prompt; a saved pipeline carries this file
prompts         one prompt -> its ids, and the positions of all tokens of its grids
decode_step     one token of every row through the layers, with mask and positions made once
sources         codes of source images, and their keys and values in the decoder
decoding        the decoder as a component
policy          the token model as a component, and the Policy protocol over both
family          checks, without importing the models' libraries
"""
