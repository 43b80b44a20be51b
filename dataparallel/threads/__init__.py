"""Threads that run replicas: which they are, how many run at a time, and which settings of the caller they see."""
