"""Checks that a query's plan keeps the promise of its stages."""
