"""The reward actor: main loop, and scoring of completions: functions in TRL's signature, under a timeout."""
