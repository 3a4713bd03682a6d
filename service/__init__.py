"""tidegauge's service: the central record of a pipeline's progress in event time."""

from importlib.metadata import version

__version__ = version("tidegauge")
"""Version of the installed package."""
