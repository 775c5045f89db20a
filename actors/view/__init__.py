"""`actors view`: pages about runs in a browser. Pure readers of a run's files, an index of its groups, and a server."""
