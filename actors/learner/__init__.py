"""Training of the policy: learner, optimizer, ranks of a gang, and checkpoints."""
