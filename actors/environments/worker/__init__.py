"""Program of a worker process: it plays episodes of an environment, or calls a reward function.

Imports nothing of ours, only pyzmq and msgpack: the interpreter may be any Python from 3.10 on, with the packages of
the user's code. docs/internals/environment-workers.md describes the messages, for workers in other languages.
"""
