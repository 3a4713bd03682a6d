"""What the integration tests stand on: the service in process, the service as a process, its model."""
