"""An AutoModelForImageTextToText of transformers as a policy over texts: a causal language model that reads images.

settings       how completions are sampled, and how large images may be
loading        a folder or a hub name -> processor; what is trained, with or without what encodes images
prompts        one prompt with its images -> ids, positions, pixels and their features; ids that stand for images
policy         the Policy protocol on top of these
family         checks, without importing the models' libraries
"""
