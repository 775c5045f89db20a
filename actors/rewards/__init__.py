"""How completions are scored: functions in TRL's signature, found by name or import path, called under a timeout."""
