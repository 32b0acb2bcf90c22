"""Rewards that another model decides.

judge           a language or vision-language model behind HTTP, asked for a score
reward_model    a sequence classification model of texts, loaded here
"""
