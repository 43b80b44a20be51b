"""Modules whose replicas talk to each other inside ``forward``."""

__all__: list[str] = []
