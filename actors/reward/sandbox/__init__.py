"""Processes with limits for answers that may hang, crash or attack: programs written by the policy, and mathematics."""
