"""vLLM as an engine: a server of its own behind the actor's HTTP, started and owned by it or found at a URL.

guard     runs the server for as long as its owner lives
process   the owned server: command line, environment, log, end
inside    what that server loads of ours: a door before the endpoints that change weights, and a way to set norms
norms     the norms with noise of a version
versions  which vLLM this was tested with
client    the server's HTTP
answers   its answers as completions, with the version that sampled each token: pure functions
engine    all of these as an `Engine`
"""
