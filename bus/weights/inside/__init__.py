"""Modules of the weight channels that inference servers load too.

Only this folder is put on a server's path, as its environment may be another.
"""
