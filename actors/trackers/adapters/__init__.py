"""One module per tracker, named by `telemetry.trackers[].type`; each imports its own package alone."""
