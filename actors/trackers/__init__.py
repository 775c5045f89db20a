"""Trackers: the metrics of a run, read from its files and sent to W&B, TensorBoard, Trackio, MLflow and SwanLab."""
