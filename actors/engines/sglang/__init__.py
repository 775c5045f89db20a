"""SGLang as an engine: a server that is there already, behind the actor's HTTP. None is ever started here.

versions  which SGLang this was held against, and what a server must be started with
client    the server's HTTP
answers   requests in its terms, its answers as completions: pure functions
engine    all of these as an `Engine`
"""
