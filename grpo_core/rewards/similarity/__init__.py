"""How like an image is to its target, or to an image in its prompt.

pairs    what compares, and mse, psnr, r2, ssim; tensors has the measures
lpips    learned perceptual distance
"""
