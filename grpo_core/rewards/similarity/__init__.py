"""Rewards for similarity to a target image: ``pixels`` has mse, psnr and ssim, ``lpips`` the learned distance."""
