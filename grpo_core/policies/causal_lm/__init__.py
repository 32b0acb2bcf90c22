"""Any AutoModelForCausalLM of transformers as a policy over texts.

settings    how completions are sampled
loading     a folder or a hub name -> model and tokenizer, the checks before loading, and what is trained
prompts     prompts, plain or as conversations -> left-padded ids with their positions
sampling    the autoregressive loop, and when a completion ends
scoring     log-probs of stored completions
policy      the Policy protocol on top of these
family      checks, without importing the models' libraries
estimate    GPU memory and disk space
"""
