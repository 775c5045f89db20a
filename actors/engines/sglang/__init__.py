"""SGLang as an engine: an existing server behind the actor's HTTP. The engine never starts a server.

versions  supported version of SGLang, and the options a server needs
client    HTTP client of the server
answers   requests in SGLang's terms, and answers as completions: pure functions
engine    all of these as an `Engine`
"""
