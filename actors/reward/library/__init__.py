"""Reward functions by name, with the parameters and the numbers of the libraries that they come from."""
