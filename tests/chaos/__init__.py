"""Faults, one after the other and mixed, and the proof that none of them loses anything."""
