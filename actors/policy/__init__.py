"""The policy in the trainer: model, packed forward, optimizer, checkpoints. Imports torch; the other actors do not."""
