"""The private implementation of gradwire. Everything in this package may change without notice."""
