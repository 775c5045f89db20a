"""What crosses a boundary: messages between processes, the run's configuration, errors. pydantic and numpy only."""
