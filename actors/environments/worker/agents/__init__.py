"""Parts of agents that are programs: commands below guards, folders, containers, rewards.

Imports the standard library alone, like the rest of the worker.
"""
