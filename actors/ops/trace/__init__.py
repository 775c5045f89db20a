"""`actors trace`: the timeline of some steps of a run, as a picture for Perfetto and in words."""
