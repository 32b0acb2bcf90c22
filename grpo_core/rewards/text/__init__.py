"""Rewards of texts by rule.

rules    answer, format
boxes    box_iou: the boxes of an answer beside those of the data
"""
