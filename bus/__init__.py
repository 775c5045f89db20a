"""Communication between processes: codec, topology, data sockets, the control channel, weight channels."""
