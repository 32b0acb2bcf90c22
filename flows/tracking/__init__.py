"""Metrics in TensorBoard, W&B, MLflow, trackio and SwanLab through accelerate's trackers, and held-out images.

backends   what is logged of an iteration, and how each tracker continues a run
log        logs what a training or a replay has finished; a tracker that fails is left out
"""
