"""Measurements. None of them is a test; each prints a table and can write JSON."""
