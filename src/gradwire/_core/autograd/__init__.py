"""Distributed autograd: record the tensors that messages carry, and run backward passes."""
