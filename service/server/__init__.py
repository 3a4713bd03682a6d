"""The server: processes, connections, TLS, and the application that they serve."""
