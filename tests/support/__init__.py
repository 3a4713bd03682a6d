"""Parts that the integration tests share: the service in process, as a process, and its model."""
