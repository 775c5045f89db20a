"""The inference actor: main loop of an engine's process; keeps the engine at the version named by the directive."""
