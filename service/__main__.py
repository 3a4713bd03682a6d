"""`python -m service` is `tidegauge`."""

from service.cli import main

main()
