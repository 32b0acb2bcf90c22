"""Deleting what a run can do without, while every reference to it stays valid.

artifacts  a policy version or rollouts that may be pruned; rollouts without their images
leftovers  old calls, unfinished writes, and what was moved to `previous/` and `quarantine/`
"""
