"""Import of other systems' configurations: files of Surogate, prime-rl, TRL, AReaL and ms-swift to a run.yaml."""
