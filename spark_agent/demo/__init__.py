"""The demonstration: New York's flights of 2013, in sessions per aircraft."""
