"""Calls between workers: who there is, how to reach them, asking and answering.

What the messages mean to the rooms above is not known here. They register a handler per kind of
message, and interceptors that see user calls pass.
"""
