"""What a run can do without, taken away so that everything which refers to it stays right.

prunable    an artifact as whoever prunes sees it: its age, its size, and whether it was pruned before
images    rollouts without their images
set_aside   what was moved out of the way long ago
lost_scores what is told when scores are to be made again and the images are gone
leftovers   calls and half-written files of processes that are gone
"""
