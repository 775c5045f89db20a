"""How processes reach each other: codec, topology, data sockets, the control channel, weight channels."""
