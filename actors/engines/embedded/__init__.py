"""Embedded engine: a transformers model inside the inference actor."""
