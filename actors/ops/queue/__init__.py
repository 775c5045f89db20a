"""Queue of runs on one machine (`actors up` with several files, or with `--sweep`): plan, collisions, processes."""
