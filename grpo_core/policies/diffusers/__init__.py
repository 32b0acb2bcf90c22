"""Any text-to-image pipeline of diffusers with a flow-matching Euler scheduler as a policy; its transformer is trained.

pipeline_class  what a class of pipeline can do, and why another one cannot be trained
saved_pipeline  the files of a saved pipeline, how images are sampled and guided, and the sizes that it generates
loading         the pipeline, its networks on the meta device, default targets of adapters
prompt_cache    each prompt is encoded once
source_images   the images of a prompt as the calls of pipelines that edit images take them
component       the transformer as a component: what the call of its class is given
policy          the Policy protocol
family          checks, without importing the models' libraries; prompts that are too long
"""
