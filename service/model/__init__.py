"""The types that the ports, the use cases and the API share."""
