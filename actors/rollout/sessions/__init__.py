"""Sessions of agents: HTTP endpoints in the words of several APIs, each session recorded as one trajectory."""
