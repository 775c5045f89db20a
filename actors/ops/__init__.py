"""Commands on a run: check, start, watch, rewind, restore, replay a step."""
