"""What a run shows of itself: metrics, logs, the step reporter."""
