"""A module tree, read once per call and copied. Nothing here moves tensors between devices or runs replicas."""
