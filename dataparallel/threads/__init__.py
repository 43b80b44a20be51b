"""The threads that run replicas, how many run at a time, and which of the caller's settings they see."""
