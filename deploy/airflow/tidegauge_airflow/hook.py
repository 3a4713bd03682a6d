"""The connection to the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseHook

from spark_agent import Client
from spark_agent.exceptions import AggregatorError

if TYPE_CHECKING:
    from airflow.sdk import Connection


class TidegaugeHook(BaseHook):
    """The client of a connection of Airflow.

    A connection has a host, a port, the schema `https` where the service has TLS, and a reader's key
    as its password. In place of the password, the extra `key_file` is the path of a file with the key.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "tidegauge_default"
    conn_type = "tidegauge"
    hook_name = "tidegauge"

    def __init__(self, conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.conn_id = conn_id

    def get_conn(self) -> Client:
        """Return a client of the service. Raises Airflow's error for an unknown connection."""
        return client_of(self.get_connection(self.conn_id))

    async def async_conn(self) -> Client:
        """Return a client of the service, as a trigger gets it."""
        return client_of(await self.aget_connection(self.conn_id))

    def test_connection(self) -> tuple[bool, str]:
        """Return the result of a request that needs the key of a reader, and its text."""
        try:
            with self.get_conn() as client:
                jobs = len(client.jobs()["jobs"])
        except (AggregatorError, ValueError) as error:
            return False, str(error)
        return True, f"the service answers, with {jobs} jobs"


def client_of(connection: Connection) -> Client:
    """Return the client of a connection. Raises `ValueError` for a connection without a host."""
    if not connection.host:
        raise ValueError(
            f"connection {connection.conn_id!r} has not a host: set the host of the service"
        )
    host = connection.host
    if "://" not in host:
        # Airflow takes the brackets off an address of IPv6.
        host = f"[{host}]" if ":" in host else host
        host = f"{connection.schema or 'http'}://{host}"
    if connection.port:
        host = f"{host}:{connection.port}"
    return Client(
        host,
        key=connection.password or None,
        key_file=connection.extra_dejson.get("key_file"),
    )
