"""HTTP server in front of an engine, and the client for rollout actors."""
