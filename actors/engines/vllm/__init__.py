"""vLLM as an engine: a server behind the actor's HTTP, started and owned by this engine or found at a URL.

guard     runs an owned server for the lifetime of its owner
process   owned server: command line, environment, log, start and stop
inside    our modules in an owned server: a door before the endpoints for changes of weights, and a setter of norms
norms     norms of a version with noise
versions  supported version of vLLM
client    HTTP client of the server
answers   the server's answers as completions, with the version of each token: pure functions
engine    all of these as an `Engine`
"""
