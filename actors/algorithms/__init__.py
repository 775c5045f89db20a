"""The algorithms: pure functions of arrays and plain values. No bus, no I/O, no clock."""
