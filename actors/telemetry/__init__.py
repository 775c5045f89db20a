"""Telemetry of a run: metrics, logs, and the files written for each step."""
