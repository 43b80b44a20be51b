"""The cupy transport: `transport` says which tensors it carries, `tables` packs addresses, `launch` starts kernels."""
