"""Rewards from the embeddings of images and texts.

clip          which CLIP the settings mean; clip_rewards loads it: clip_score, aesthetic
preference    which image people would prefer for a prompt: pickscore, hpsv2
diversity     how unlike one another the images of a group are, by pixels, lpips or clip
"""
