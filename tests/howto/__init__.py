"""Tests of docs/howto: each block runs or loads, each table says what the code does."""
