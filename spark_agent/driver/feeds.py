"""The feeds of a driver's linked sources: control sources, and logs in folders."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError, Py4JJavaError

from spark_agent.driver.early_feed import EarlyFeed
from spark_agent.driver.watermark_feed import WatermarkFeed
from spark_agent.exceptions import NotStartedError
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.driver_link import LinkError, Offset, RetryLater

_log: Final = logging.getLogger("spark_agent")

Feed = WatermarkFeed | EarlyFeed


@contextmanager
def _without_news() -> Generator[None]:
    """Raise `LinkError` if the connection to Spark fails in the block: the next request replaces it.

    An exception of Java passes: the next request would get it, too.
    """
    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionError) as error:
        _log.warning("a source gets no answer: the connection to Spark has failed", exc_info=True)
        raise LinkError(str(error)) from error


class Feeds:
    """Routes the requests of linked sources to the feeds of their queries. Thread-safe.

    A source gets its id when its data frame is built, and a feed when its query starts. A request
    outside of that is refused, such as that of a query which was started without the pipeline.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._feeds: dict[str, tuple[str, Feed | None]] = {}

    def new_source(self, stage: str) -> str:
        """Return the id of a new linked source, which has no feed yet."""
        source = str(next(self._ids))
        self._feeds[source] = stage, None
        return source

    @contextmanager
    def connecting(self, sources: Collection[str], feed: Feed) -> Generator[None]:
        """Set the feed of a query's linked sources; if the block fails, restore the previous feeds."""
        before = {source: self._feeds[source] for source in sources}
        for source, (stage, _) in before.items():
            self._feeds[source] = stage, feed
        try:
            yield
        except BaseException:
            self._feeds.update(before)
            raise

    def disconnect(self, ended: Feed) -> None:
        """Remove the feed of a query that has ended from its sources."""
        # A copy: another thread may build a source meanwhile.
        for source, (stage, feed) in list(self._feeds.items()):
            if feed is ended:
                self._feeds[source] = stage, None

    def admit(self, source: str, wanted: Wanted, until_ms: int) -> Admission:
        """Return what a source of ours may read.

        Raises `NotStartedError`, `QueryFailedError`, `LinkError` if it cannot be answered.
        """
        stage, feed = self._feeds.get(source, ("", None))
        if not isinstance(feed, WatermarkFeed):
            raise NotStartedError(stage)
        with _without_news():
            return feed.admit(stage, wanted, until_ms)

    def next_offset(
        self, source: str, reader: str, at: Offset, until_ms: int
    ) -> Offset | RetryLater:
        """Return a control source's next offset.

        Raises `NotStartedError`, `QueryFailedError`, `LinkError` if it cannot be answered.
        """
        stage, feed = self._feeds.get(source, ("", None))
        if feed is None:
            raise NotStartedError(stage)
        if isinstance(feed, EarlyFeed):
            return feed.next(at)
        with _without_news():
            return feed.next(reader, stage, at, until_ms)
