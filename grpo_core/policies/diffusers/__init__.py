"""Pipelines of diffusers with a flow-matching Euler scheduler, to make or edit images; the transformer is trained.

accepted_pipelines  what a class of pipeline can do, and why another one cannot be trained
saved_pipeline      the files of a saved pipeline, how images are sampled and guided, and the sizes that it generates
loading             the pipeline, its networks on the meta device, default targets of adapters
prompt_cache        each prompt is encoded once
source_images       the images of a prompt as the calls of pipelines that edit images take them
component           the transformer as a component: what the call of its class is given
policy              the Policy protocol
family              checks, without importing the models' libraries; prompts that are too long
"""
