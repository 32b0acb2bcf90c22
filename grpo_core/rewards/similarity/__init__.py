"""Rewards for similarity to a target image: mse, psnr, ssim, lpips; ``pairs`` brings the two images together."""
