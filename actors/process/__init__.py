"""Parts of every actor process: place in the run, signs of life, limits of the system, fault points, user code."""
