"""What the integration tests stand on: the service in process, as a process, and its model."""
