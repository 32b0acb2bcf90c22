"""Rewards for similarity to a target image: ``pixels`` has mse, psnr, r2 and ssim, ``lpips`` the learned distance.

``measures`` computes those of ``pixels``.
"""
