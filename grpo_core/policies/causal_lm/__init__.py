"""Any AutoModelForCausalLM of transformers as a policy over texts.

settings    how completions are sampled
loading     a folder or a hub name -> model and tokenizer, and what can be known to be wrong before
prompts     prompts, plain or as conversations -> left-padded ids with their positions
stopping    when a completion ends
sampling    the autoregressive loop
training    what of a model is trained
scoring     log-probs of stored completions
policy      all of it behind the Policy protocol
family      the same without importing what its models need, and the memory estimate
"""
