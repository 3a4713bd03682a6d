"""The server: processes, connections, TLS, and the application."""
