"""Callbacks: events of a run read from its files, and the actor that tells them to objects of the user."""
