"""Conversion of values to bytes and back. The modules here use no sockets, threads or clocks."""
