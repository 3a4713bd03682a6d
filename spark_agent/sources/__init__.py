"""Streaming sources of our own, in which single shards wait while others go on."""
