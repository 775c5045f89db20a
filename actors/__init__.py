"""Five kinds of actors, the packages they are made of, and the commands on a run."""
