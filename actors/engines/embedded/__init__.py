"""The embedded engine: a transformers model with continuous batching, no server to install."""
