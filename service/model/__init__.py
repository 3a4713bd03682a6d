"""The words that the ports, the use cases and the API share."""
