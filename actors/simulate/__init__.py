"""Simulation of a run in virtual time: the real ledger, admission, lag rules and packing, with models of all times."""
