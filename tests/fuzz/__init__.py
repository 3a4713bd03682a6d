"""A fuzzer of the running service: `python -m tests.fuzz`, or `make fuzz`."""
