"""An AutoModelForImageTextToText of transformers as a policy over texts: a causal language model that reads images.

settings       how completions are sampled, and how large images may be
loading        a folder or a hub name -> processor; what is trained, with or without what encodes images
prompts        one prompt with its images -> ids, token types and pixels, and the ids that stand for images
features       pixels -> features that take the place of these ids, computed once and shared
encoding       prompts with positions and features, padded as the model reads them; those that were read last
policy         the Policy protocol on top of these
family         checks, without importing the models' libraries
"""
