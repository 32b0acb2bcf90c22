"""Metrics in TensorBoard, W&B, MLflow, trackio and SwanLab through accelerate's trackers, and held-out images.

step         what is logged of one iteration: metrics, held-out images
backends     how each tracker continues a run
log          logs what a training or a replay has finished; a tracker that fails is left out
"""
