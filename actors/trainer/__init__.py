"""The trainer actor: main loop, and the threads that save checkpoints and broadcast weights."""
