"""Text-to-image pipelines of diffusers that are trained by their denoising steps."""
