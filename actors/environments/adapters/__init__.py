"""Environments of other packages, each in a file that a worker loads by its path: `.../adapters/textarena.py:Env`.

A file imports its package and the standard library alone, because its interpreter may have nothing of ours.
"""
