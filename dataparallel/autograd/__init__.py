"""`dataparallel.comm` in autograd's graph: functions of tensors, and the nodes of buckets of parameters."""
