"""Delete artifacts that nothing depends on, while every reference to them stays valid.

artifacts  a policy version or rollouts that may be pruned; rollouts without their images
leftovers  old calls, unfinished writes, and folders in `previous/` and `quarantine/`
"""
