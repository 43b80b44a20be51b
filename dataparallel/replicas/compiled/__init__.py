"""Compiled replicas: all replicas of a module on one device call one compiled function.

``torch.compile`` lifts a module's parameters and buffers to inputs of the graph, so a graph that was made for one
replica computes with the tensors of any other. Importing this room does not import the compiler.
"""
