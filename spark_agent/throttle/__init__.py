"""Throttling of sources that are ahead of others, or of the stages below."""
