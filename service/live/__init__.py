"""The live port and its stores: the soft state, whose loss only costs time."""
