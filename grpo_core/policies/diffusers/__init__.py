"""Any text-to-image pipeline of diffusers with a flow-matching Euler scheduler as a policy; its transformer is trained.

settings        how images are sampled
pipeline_class  what a class of pipeline can do, and why another one cannot be trained
saved_pipeline  the configuration files of a saved pipeline, and the image sizes that it generates
guidance        which arguments give a pipeline its guidance
prompt_cache    each prompt is encoded once
prompts         prompts that are longer than what the text encoders read
loading         the pipeline, its networks on the meta device, default targets of adapters
policy          the Policy protocol on top of these
family          checks, without importing the models' libraries
"""
