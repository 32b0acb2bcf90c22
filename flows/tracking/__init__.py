"""Metrics and held-out samples in TensorBoard, W&B, MLflow, trackio and SwanLab, through accelerate's trackers.

step         what is logged of one iteration: metrics, rewards, held-out samples
backends     how each tracker continues a run and shows images, texts and histograms
log          logs what a training or a replay has finished; a tracker that fails is left out
"""
