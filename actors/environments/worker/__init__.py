"""Program of a worker process: it loads an environment and plays episodes for a rollout actor.

Imports nothing of ours, only pyzmq and msgpack: the interpreter may be any Python from 3.10 on, with the packages of
the environment. docs/internals/environment-workers.md describes the messages, for workers in other languages.
"""
