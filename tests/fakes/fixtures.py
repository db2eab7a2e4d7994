"""Fixtures of the fakes."""
