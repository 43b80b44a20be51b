"""`dataparallel.comm` in the graph of autograd: functions of tensors, and the nodes of buckets of parameters."""
