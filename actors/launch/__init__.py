"""Runs on clusters: which node runs which actors, `actors node`, and what each kind of cluster is asked for."""
