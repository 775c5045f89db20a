"""Modules loaded by an owned vLLM server.

Only this folder is put on the server's path, as the environment may be another.
"""
