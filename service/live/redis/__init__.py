"""The live store that any number of processes share."""
