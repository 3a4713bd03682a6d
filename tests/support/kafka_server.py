"""A real Kafka broker: one process without ZooKeeper, with its files in a folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,  # pyright: ignore[reportPrivateImportUsage]
    AclBindingFilter,  # pyright: ignore[reportPrivateImportUsage]
    AclOperation,  # pyright: ignore[reportPrivateImportUsage]
    AclPermissionType,  # pyright: ignore[reportPrivateImportUsage]
    AdminClient,
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    NewPartitions,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
    ResourcePatternType,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from spark_agent.demo.broker import BrokerFiles
from spark_agent.kafka_jars import KafkaJars
from tests.support.binaries import free_port, launch, wait_until
from tests.support.process import ServerProcess

_ANSWER_S = 30

RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
"""Settings of a broker that checks rights. Clients without a name have all that is not denied."""


class KafkaServer(ServerProcess):
    """One broker, through any number of processes."""

    def __init__(
        self, jars: KafkaJars, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._files = BrokerFiles(jars, folder, free_port(), free_port())
        self._settings = settings or {}

    @property
    def servers(self) -> str:
        """Its address, as `bootstrap.servers` has it."""
        return self._files.servers

    @cached_property
    def admin(self) -> AdminClient:
        """A client for administration. What it does ends with it."""
        return AdminClient({"bootstrap.servers": self.servers})

    def start(self) -> None:
        """Start, and return once it serves metadata."""
        assert self._process is None, "already running"
        self._files.prepare(self._settings)
        log = self._files.folder / "kafka.log"
        self._process = launch(self._files.command, log, cwd=self._files.folder)
        wait_until(self._ready, f"Kafka ready\n{log.read_text(errors='replace')[-4000:]}")

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"ended with {self._process.returncode}"
        # A client would log each refused connection.
        if not self._files.is_listening():
            return False
        try:
            return bool(self.admin.list_topics(timeout=5).brokers)
        except KafkaException:
            return False

    def resume_after(self, seconds: float) -> None:
        """Resume later, unless it has been resumed by then."""
        threading.Timer(seconds, self.resume).start()

    def create(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Create a topic, and return once it is there."""
        made = NewTopic(topic, partitions, 1, config=dict(config or {}))
        self.admin.create_topics([made])[topic].result(_ANSWER_S)
        wait_until(lambda: self.partitions(topic) == partitions, f"{topic} is there")

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions to a topic, up to this number."""
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(_ANSWER_S)
        wait_until(lambda: self.partitions(topic) == partitions, f"{topic} has grown")

    def delete(self, topic: str) -> None:
        """Delete a topic, and return once it is gone."""
        self.admin.delete_topics([topic])[topic].result(_ANSWER_S)
        wait_until(lambda: not self.partitions(topic), f"{topic} is gone")

    def delete_rows(self, topic: str, partition: int, before: int) -> None:
        """Remove the rows before an offset, as retention does."""
        at = TopicPartition(topic, partition, before)
        self.admin.delete_records([at])[at].result(_ANSWER_S)

    def configure(self, topic: str, config: Mapping[str, str]) -> None:
        """Set a topic's configuration."""
        resource = ConfigResource(ResourceType.TOPIC, topic, set_config=dict(config))
        self.admin.alter_configs([resource])[resource].result(_ANSWER_S)

    def deny(self, topic: str, operation: str) -> None:
        """Deny all clients an operation on a topic, such as `READ`. The broker has `RIGHTS`."""
        rules = [
            AclBinding(
                ResourceType.TOPIC,
                topic,
                ResourcePatternType.LITERAL,
                "User:*",
                "*",
                what,
                permission,
            )
            for what, permission in (
                # With one rule on a topic, what is not allowed is denied.
                (AclOperation.ALL, AclPermissionType.ALLOW),
                (AclOperation[operation], AclPermissionType.DENY),
            )
        ]
        for done in self.admin.create_acls(rules).values():
            done.result(_ANSWER_S)

    def allow(self, topic: str) -> None:
        """Delete all rules on a topic."""
        rules = AclBindingFilter(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.LITERAL,
            None,  # pyright: ignore[reportArgumentType]
            None,  # pyright: ignore[reportArgumentType]
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        assert self.admin.delete_acls([rules])[rules].result(_ANSWER_S), "there was not a rule"

    def partitions(self, topic: str) -> int:
        """Return the number of a topic's partitions; 0: not there."""
        found = self.admin.list_topics(timeout=_ANSWER_S).topics.get(topic)
        return 0 if found is None or found.error is not None else len(found.partitions)

    def producer(self, settings: Mapping[str, str] | None = None) -> Producer:
        """Return a producer."""
        return Producer({"bootstrap.servers": self.servers, **(settings or {})})
