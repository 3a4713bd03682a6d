"""The live port and its stores: what is soft, and costs only time when it is lost."""
