"""Which stream does what, and what orders the streams. Each room names the events that order its work."""
