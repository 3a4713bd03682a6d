"""Metrics, traces, and the redaction of secrets in both."""
