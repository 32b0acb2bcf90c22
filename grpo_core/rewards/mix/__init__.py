"""Several rewards of a sample become one.

- ``terms``: what one reward does in the mix: it adds with a weight, or it is a gate; clamp, threshold, normalisation.
- ``combine``: scaled values -> R = sum over k of w_k s_k, times the gates; what replaces a null value.
- ``running``: mean and spread of each reward over every call so far.

R is absolute: it means the same in every iteration and on held-out prompts. It is what curves show. The normalisations
`group` and `running` compare a sample with others, so that their mean does not say how good the samples are; they
belong to the advantages (`grpo_core.advantages`), which read the same terms.
"""
