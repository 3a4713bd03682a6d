"""The driver's part of reporting: one supervisor for each started query."""
