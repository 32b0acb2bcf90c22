"""An AutoModelForCausalLM of transformers as a policy over texts.

settings          how completions are sampled
loading           a folder or a hub name -> model and tokenizer, checks before, what adapters leave out
model_types       which types of models are tried, and which cannot run
prompts           prompts, plain or as conversations with images or without -> what the template prints -> ids
ends              end tokens and stop texts
written           the tokens of a batch while they are sampled, and where each ends
decode_steps      the passes over one token of every row: the model's own, or of fixed shapes, as CUDA graphs
sampling_scoring  the autoregressive loop, and log-probs of stored completions
shared_prompts    a prompt computed once for all of its completions, with gradients
policy            the Policy protocol on top of these
family            checks, without importing the models' libraries
"""
