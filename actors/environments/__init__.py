"""Environments: user code that answers the model's turns, in worker processes with an interpreter of their own choice.

`worker/` is the program of a worker process, and `pool` starts, watches and replaces worker processes. No actor uses
this package yet.
"""
