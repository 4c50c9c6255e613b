"""Gradients across workers: recording what crosses, and running backward through it."""
