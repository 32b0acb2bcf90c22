"""An AutoModelForCausalLM of transformers as a policy over texts.

settings          how completions are sampled
loading           a folder or a hub name -> model and tokenizer, checks before, what adapters leave out
prompts           prompts, plain or as conversations -> left-padded ids with their positions
sampling_scoring  the autoregressive loop, and log-probs of stored completions
compatibility     whether a model can be sampled and scored, tried on a small copy of it (small_copy)
policy            the Policy protocol on top of these
family            checks, without importing the models' libraries
"""
