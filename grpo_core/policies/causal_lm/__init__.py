"""An AutoModelForCausalLM of transformers as a policy over texts.

settings       how completions are sampled
loading        a folder or a hub name -> model and tokenizer, and the checks before loading
adapters       what is trained, and which matrices adapters leave out
prompts        prompts, plain or as conversations -> left-padded ids with their positions
sampling       the autoregressive loop, and when a completion ends
scoring        log-probs of stored completions
compatibility  whether a model can be sampled and scored, tried on a small copy of it
small_copy     the copy: random weights, narrow layers
policy         the Policy protocol on top of these
family         checks, without importing the models' libraries
"""
