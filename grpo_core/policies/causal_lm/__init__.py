"""Any AutoModelForCausalLM of transformers as a policy over texts.

settings    how completions are sampled
loading     a folder or a hub name -> model and tokenizer, and the checks before loading
prompts     prompts, plain or as conversations -> left-padded ids with their positions
stopping    when a completion ends
sampling    the autoregressive loop
training    which parameters are trained
scoring     log-probs of stored completions
policy      the Policy protocol on top of these
family      checks and the memory estimate, without importing the models' libraries
"""
