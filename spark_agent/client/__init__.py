"""The client of the service's HTTP API. Does not import Spark."""
