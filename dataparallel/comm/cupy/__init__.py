"""The cupy transport: ``transport`` picks the tensors for kernels, ``tables`` packs addresses, ``launch`` launches."""
