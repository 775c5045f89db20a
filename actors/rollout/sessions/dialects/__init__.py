"""APIs that agents speak: each module turns the body of a request into a `Call`, and a `Reply` into an answer."""
