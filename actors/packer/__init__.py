"""The packer: main loop, and the record of the run on disk."""
