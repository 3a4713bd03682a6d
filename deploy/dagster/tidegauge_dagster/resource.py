"""The connection to the service."""

from dagster import ConfigurableResource

from spark_agent import Client


class TidegaugeResource(ConfigurableResource[Client]):
    """The address of the service, and the file with the key of a reader.

    The configuration has the path of the key, and not the key: Dagster shows configuration to its users.
    """

    url: str
    key_file: str | None = None

    def client(self) -> Client:
        """Return a client of the service."""
        return Client(self.url, key_file=self.key_file)
