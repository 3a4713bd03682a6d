"""Queries that this driver has started, and the watermarks that they get."""
