"""The uploader actor: pushes checkpoints to the Hugging Face hub."""
