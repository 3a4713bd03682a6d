"""The command `python -m service`, the same as `tidegauge`."""

from service.cli import main

main()
