"""Report of a run as one HTML file that needs nothing else (`actors report`)."""
