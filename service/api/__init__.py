"""HTTP: one router per resource. It translates to use cases and back, and does nothing else."""
