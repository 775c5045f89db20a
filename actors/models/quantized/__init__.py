"""Frozen base models whose weights are codes of 8 or 4 bits, in the files of compressed-tensors.

Trainer and engines load the same codes, so they differ by their kernels alone. `codes` has the pure functions,
`layer` the module that computes with codes, `scheme` the description in config.json, `loading` the way into a model,
`writing` makes such a folder from a model in 16 or 32 bits.
"""
